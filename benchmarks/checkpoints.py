"""Checkpoints of random weights, written without a model in memory; widths are those of real models."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from .formats import FORMATS, Tensors, stored

FILE_BYTES = 2_000_000_000
"""Most bytes of a file, unless one matrix is larger."""
Shape = tuple[int, ...]

LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
PHI3 = {
    "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064, "num_attention_heads": 32,
    "num_key_value_heads": 32, "pad_token_id": 0,
}  # fmt: skip
GPT_OSS = {
    "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
KINDS: dict[str, tuple[str, str, dict[str, int]]] = {
    "llama": ("llama", "", LLAMA),
    "llama-8b": ("llama", "", {**LLAMA, "vocab_size": 128256}),  # Llama 3.1 8B in 32 layers, 16.1 GB
    "mixtral": ("mixtral", "", {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "phi3": ("phi3", "", PHI3),
    "gpt_oss": ("gpt_oss", "", GPT_OSS),
    "llama-fp8": ("llama", "fp8", LLAMA),
    "gpt_oss-mxfp4": ("gpt_oss", "mxfp4", GPT_OSS),
}
"""Name -> (model type, format, fields of the config)."""


def ensure(kind: str, gigabytes: float, parent: Path) -> Path:
    """The folder of a checkpoint of about `gigabytes` (10^9 bytes); written unless it exists.

    If the size is too small for one layer of the real widths, the widths are divided by 2, 4, 8 or 16.
    """
    config = config_of(kind, gigabytes)
    known = {name: getattr(config, name) for name in (*KINDS[kind][2], "num_hidden_layers")}
    digest = hashlib.sha256(json.dumps([KINDS[kind], known]).encode()).hexdigest()[:8]
    folder = parent / f"{kind}-{gigabytes:g}GB-{digest}"
    return written_once(folder, lambda target: write(target, config, KINDS[kind][1]))


def written_once(folder: Path, write: Callable[[Path], Any]) -> Path:
    """The folder of a checkpoint that `write` writes unless it is there; an interrupted write leaves no folder."""
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            target = Path(scratch) / "checkpoint"
            write(target)
            if not (folder / "config.json").is_file():  # another process may have been faster
                target.rename(folder)
    return folder


def files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def config_of(kind: str, gigabytes: float) -> PretrainedConfig:
    """The config of the largest checkpoint of at most `gigabytes`, with at least one layer."""
    for divisor in (1, 2, 4, 8, 16):
        one, two = (nbytes(_config(kind, layers, divisor), KINDS[kind][1]) for layers in (1, 2))
        layers = int((gigabytes * 1e9 - one) / (two - one) + 1)
        if layers >= 1:
            break
    return _config(kind, max(layers, 1), divisor)


def _config(kind: str, layers: int, divisor: int) -> PretrainedConfig:
    """Widths are divided; the results stay multiples of 64."""
    model_type, _, fields = KINDS[kind]
    small = {**fields, "num_hidden_layers": layers, "tie_word_embeddings": False}
    for name in ("hidden_size", "intermediate_size", "vocab_size") if divisor > 1 else ():
        small[name] = max(64, fields[name] // divisor // 64 * 64)
    if "head_dim" in fields:
        small["head_dim"] = max(fields["head_dim"] // divisor, 8)
    return CONFIG_MAPPING[model_type](**small)


def matrices(config: PretrainedConfig) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the parameters in a checkpoint: those of Mixtral's experts are matrices of their own."""
    for name, param in _model(config).state_dict().items():
        shape = tuple(param.shape)
        if config.model_type != "mixtral" or ".mlp." not in name:
            yield name, shape
            continue
        stem, _, kind = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
        if kind == "weight":
            yield f"{stem}.weight", shape
        parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.get(kind, ())
        for expert in range(shape[0]) if parts else ():
            for part in parts:
                yield f"{stem}.{expert}.{part}.weight", (shape[1] // len(parts), shape[2])


def _model(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def nbytes(config: PretrainedConfig, form: str) -> int:
    """Bytes of all tensors."""
    return sum(_size(name, shape, torch.bfloat16, form) for name, shape in matrices(config))


def _size(name: str, shape: Shape, dtype: torch.dtype, form: str) -> int:
    with torch.device("meta"):
        return sum(tensor.nbytes for tensor in stored(name, shape, dtype, form).values())


def write(folder: Path, config: PretrainedConfig, form: str = "", dtype: torch.dtype = torch.bfloat16) -> None:
    """Write files with transformers' names, their index, and the config; `form`: a name of FORMATS."""
    folder.mkdir(parents=True)
    groups: list[dict[str, Shape]] = [{}]
    size = total = 0
    for name, shape in matrices(config):
        count = _size(name, shape, dtype, form)
        size, total = size + count, total + count
        if groups[-1] and size > FILE_BYTES:
            groups.append({})
            size = count
        groups[-1][name] = shape
    torch.manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        tensors: Tensors = {}
        for name, shape in group.items():
            tensors |= stored(name, shape, dtype, form)
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    text = {**config.to_dict(), "architectures": [type(_model(config)).__name__], "dtype": str(dtype)[6:]}
    text |= {"quantization_config": FORMATS[form][1]} if form else {}
    (folder / "config.json").write_text(json.dumps(text, indent=2), encoding="utf-8")
