"""Checkpoints of models with code of their own, which `tests/data/remote_code` has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.models import PAD

CODE = Path(__file__).parents[1] / "data" / "remote_code"


def with_code(folder: Path, name: str, **settings: Any) -> str:
    """A random checkpoint of a model of CODE, in a folder with that code."""
    folder.mkdir()
    shutil.copy(CODE / f"modeling_{name}.py", folder)
    kind = f"modeling_{name}.{name.capitalize()}"
    config = {
        "model_type": f"{name}_of_tomorrow",
        "auto_map": {"AutoConfig": f"{kind}Config", "AutoModelForCausalLM": f"{kind}ForCausalLM"},
        "architectures": [f"{name.capitalize()}ForCausalLM"],
        "pad_token_id": PAD,
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    asked = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(asked, trust_remote_code=True)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.2)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def split_by_own_widths(folder: str, *, sliced: bool = False) -> None:
    """Let attention of the model "fused" split its projection, or slice it, by numbers that no plan knows of."""
    code = Path(folder) / "modeling_fused.py"
    text = code.read_text().replace("self.qkv =", "self.widths = [config.hidden_size] * 3\n        self.qkv =")
    way = "tensor_split([self.widths[0], 2 * self.widths[0]], -1)" if sliced else "split(self.widths, -1)"
    code.write_text(text.replace("chunk(3, -1)", way))
