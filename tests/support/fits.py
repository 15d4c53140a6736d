"""Memory of well-known models on GPUs of 24 GB: `python -m tests.support.fits` writes tests/data/fits.json.

Every number is printed by `tp-transformers plan --memory`, from a config of the published shape and, of quantised
models, the header of a checkpoint; no weights are read.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tp_transformers.commands.cli import main

FILE = Path(__file__).parents[1] / "data" / "fits.json"
MEMORY = 22
"""GB of a rank that are counted on: 24, less 2 for activations and the runtime of the GPU."""
SIZES = (2, 3, 4, 6)
CONTEXT = 8192
KV_8 = {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
QWEN3 = {**KV_8, "vocab_size": 151936, "max_position_embeddings": 40960}
LLAMA3 = {**KV_8, "vocab_size": 128256, "max_position_embeddings": 131072}
MISTRAL = {**KV_8, "vocab_size": 131072, "max_position_embeddings": 32768, "sliding_window": None}
GEMMA2 = {"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144, "vocab_size": 256000}
A3B = {**QWEN3, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}


def shape(hidden: int, intermediate: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    """Fields of a config, by the names of most architectures."""
    named = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return {**named, "num_attention_heads": heads, **others}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("llama", shape(4096, 14336, 32, 32, **LLAMA3)),
    "Qwen3 8B": ("qwen3", shape(4096, 12288, 36, 32, **QWEN3)),
    "Qwen3 14B": ("qwen3", shape(5120, 17408, 40, 40, **QWEN3)),
    "gpt-oss-20b, dequantised": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "Mistral Small 24B": ("mistral", shape(5120, 32768, 40, 32, **MISTRAL)),
    "Gemma 2 27B": ("gemma2", shape(4608, 36864, 46, 32, **GEMMA2)),
    "Qwen3 30B A3B": ("qwen3_moe", shape(2048, 6144, 48, 32, **A3B)),
    "Qwen3 32B": ("qwen3", shape(5120, 25600, 64, 64, **QWEN3)),
    "Mixtral 8x7B": ("mixtral", {}),
    "Llama 3.3 70B": ("llama", shape(8192, 28672, 80, 64, **LLAMA3)),
}
"""Name -> model type, and the fields of its config that differ from the defaults of transformers."""
PACKED = {f"{name}, int4 (AWQ)": MODELS[name] for name in ("Qwen3 32B", "Llama 3.3 70B")}
"""Models with linears of 4 bits, which stay packed."""
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def plan(folder: str, *arguments: str) -> dict[str, Any]:
    """The report of `tp-transformers plan` for `MEMORY`."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        main(["plan", folder, "--memory", f"{MEMORY}GB", "--json", *arguments])
    return json.loads(stdout.getvalue())  # type: ignore[no-any-return]


def measure(model_type: str, fields: dict[str, Any], packed: bool = False) -> dict[str, Any]:
    """The number of parameters, bytes of the fullest rank by number of ranks, and the fewest ranks.

    `packed`: as an AWQ checkpoint, which is not trained.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(model_type, **fields, dtype="bfloat16")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        if packed:
            config.quantization_config = AWQ
            write_header(model, Path(folder, "model.safetensors"))
        config.save_pretrained(folder)
        context = ("--context", str(CONTEXT), *(["--packed"] if packed else []))
        reports = {size: plan(folder, "--tp-size", str(size), *context) for size in SIZES}
        training = plan(folder, "--tp-size", "2", "--context", "0", "--optimizer", "adamw") if not packed else {}
        alone = plan(folder, "--tp-size", "1", *context)
    return {
        "parameters": sum(param.numel() for param in model.parameters()),
        "bytes": {size: max(rank["total_bytes"] for rank in report["ranks"]) for size, report in reports.items()},
        "generates on": alone["smallest_tp_size"],
        "trains on": training.get("smallest_tp_size"),
    }


def write_header(model: nn.Module, file: Path) -> None:
    """Write an AWQ checkpoint of `model` without data: a header, and a hole of the size that it says."""
    stored: dict[str, tuple[str, list[int]]] = {}
    for name, module in model.named_modules():
        for key, param in module.named_parameters(name, recurse=False):
            stored[key] = ("BF16", list(param.shape))
        if isinstance(module, nn.Linear) and name != "lm_head":
            rows, columns = module.weight.shape
            del stored[f"{name}.weight"]
            groups = columns // AWQ["group_size"]
            stored[f"{name}.qweight"] = ("I32", [columns, rows // 8])
            stored[f"{name}.qzeros"] = ("I32", [groups, rows // 8])
            stored[f"{name}.scales"] = ("F16", [groups, rows])
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in stored.items():
        start, end = end, end + math.prod(shape) * (4 if dtype == "I32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        written.truncate(8 + len(text) + end)


if __name__ == "__main__":
    found = {name: measure(*model) for name, model in MODELS.items()}
    found |= {name: measure(*model, packed=True) for name, model in PACKED.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
