"""Tiny models with random weights, and what one process without tensor parallelism makes of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tp_transformers
from tests.support.comparisons import gradients

HEAD_DIM = 8
VOCAB = 199
INTERMEDIATE = 100

PAD = 0
PROMPTS = torch.tensor([[PAD, PAD, PAD, 17, 5, 98, 150], [23, 9, 41, 198, 3, 77, 12]])
MASK = (torch.arange(7) >= torch.tensor([[3], [0]])).long()
"""A left-padded batch: (2, 7)."""


@dataclass(frozen=True)
class Case:
    """A checkpoint folder and the reference file beside it."""

    folder: str
    reference: str


def llama_config(heads: int, kv_heads: int, *, kind: Any = LlamaConfig, **changes: Any) -> Any:
    """A Llama of two layers whose sizes divide by little; or a config of another class in these sizes."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": heads * HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
        # Large weights, so that logits are well spread and a greedy choice is no coin toss.
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    return kind(**{**settings, **changes})


def save_as_loaded(model: Any, folder: Path, **options: Any) -> Any:
    """Save `model` in `folder`/checkpoint as it is saved after a load, and return it as loaded.

    A model that was made cuts its files in another order and, if it is converted, stores its tensors in another form.
    """
    model.save_pretrained(folder / "first")
    model = type(model).from_pretrained(folder / "first")
    model.save_pretrained(folder / "checkpoint", **options)
    return model


def edited(folder: str, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """A copy of a checkpoint in one file, with its tensors changed."""
    shutil.copytree(folder, target)
    tensors = {}
    for file in target.glob("*.safetensors"):
        tensors.update(load_file(file))
        file.unlink()
    (target / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def make_case(folder: Path, heads: int, kv_heads: int, *, max_shard_size: str = "60KB", **changes: Any) -> Case:
    """Write a random checkpoint in several files, and the reference that one process computes from it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(heads, kv_heads, **changes))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                param.add_(torch.randn_like(param) * 0.2)
    model = save_as_loaded(model, folder, max_shard_size=max_shard_size)
    return save_reference(observe(model), folder)


def save_reference(seen: dict[str, Any], folder: Path) -> Case:
    """Save what one process makes of the model of `folder`/checkpoint."""
    torch.save(seen, folder / "reference.pt")
    return Case(str(folder / "checkpoint"), str(folder / "reference.pt"))


def observe(model: Any) -> dict[str, Any]:
    """What a model does, in numbers: logits and greedy tokens of a left-padded batch, loss and every gradient."""
    logits, prompts, mask = logits_of(model), PROMPTS.to(model.device), MASK.to(model.device)
    tokens = model.generate(prompts, attention_mask=mask, max_new_tokens=8, do_sample=False)
    model.zero_grad()
    loss = model(prompts, attention_mask=mask, labels=prompts).loss
    loss.backward()
    return {
        "logits": logits,
        "tokens": tokens,
        "loss": loss.detach(),
        "grads": gradients(model),
    }


def load(folder: str | Path | None, auto: Any = AutoModelForCausalLM, tp_plan: Any = "auto", **arguments: Any) -> Any:
    """`auto.from_pretrained` with the hook on: a tensor-parallel model, a plain one for `tp_plan=None`.

    With `output_loading_info=True`, a pair of the model and the info, as from transformers.
    """
    with tp_transformers.enable():
        return auto.from_pretrained(folder, tp_plan=tp_plan, **arguments)


def by_shares(shares: Sequence[float] | None) -> dict[str, Any]:
    """The argument of a load by `shares`; none for even ones, which need no feature."""
    return {} if shares is None or len(set(shares)) == 1 else {"tp_shares": shares}


def with_shares(shares: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run on every rank: `function(*args)`, where tensor-parallel models are split by `shares`, "2,1"."""
    os.environ["TP_TRANSFORMERS_SHARES"] = shares
    try:
        return function(*args)
    finally:
        del os.environ["TP_TRANSFORMERS_SHARES"]


def load_both(folder: str, auto: Any = AutoModelForCausalLM, **arguments: Any) -> tuple[Any, Any]:
    """(tensor-parallel model, model of one process); the latter is loaded without those arguments that are ours."""
    plain = {name: value for name, value in arguments.items() if not name.startswith(("tp_", "device_mesh"))}
    return load(folder, auto, **arguments), auto.from_pretrained(folder, **plain)


def logits_of(model: Any) -> torch.Tensor:
    """Logits of the left-padded batch: (2, 7, vocabulary), without gradients."""
    with torch.no_grad():
        logits: torch.Tensor = model(PROMPTS.to(model.device), attention_mask=MASK.to(model.device)).logits
    return logits


def headers(folder: str | Path) -> int:
    """Bytes of the headers of all safetensors files in a folder, with their lengths."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)


def bytes_read(model: Any) -> int:
    """Bytes that this rank read for itself, or has in the pages of the files, headers included.

    Where a page is not in memory just then, rows are read whole in blocks; what lies between their runs is left out.
    """
    report = model.tp_report
    nbytes, copied, _ = report.methods.get("blocks", (0, 0, 0.0))
    return int(report.bytes_read + report.mapped - (copied - nbytes))


def excess_read(model: Any, folder: str | Path) -> int:
    """Bytes that this rank read of a checkpoint besides those that it holds and the headers."""
    return bytes_read(model) - held(model) - headers(folder)


def held(model: Any) -> int:
    """Bytes of the checkpoint that this rank holds: its parameters, tied ones once, and persistent buffers."""
    state = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tp_transformers.local_tensor(tensor).nbytes for tensor in state.values())
