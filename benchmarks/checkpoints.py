"""Checkpoints of random weights, written without a model in memory: in bf16, in FP8, or with experts in MXFP4.

Layouts and widths are those of real models; the number of layers depends on the size.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

FILE_BYTES = 2_000_000_000
"""Most bytes of a file, unless one tensor is larger."""

_CHUNK = 16 << 20
"""Bytes to generate and write at a time."""

SCALE, BLOCKS, EXPONENTS = "_scale_inv", "_blocks", "_scales"
"""Name suffixes of the tensors of a quantised weight: FP8's scales, MXFP4's values and exponents."""
FP8_BLOCK = 128
"""Rows and columns of a block with one scale."""

Shapes = dict[str, tuple[int, ...]]


def ensure(model_type: str, gigabytes: float, parent: Path) -> Path:
    """The folder of a checkpoint of about `gigabytes` (10^9 bytes); written unless it exists.

    If the size is too small for one layer of the real widths, the widths are divided by 2, 4, 8 or 16.
    """
    config, shapes = config_and_shapes(model_type, gigabytes)
    digest = hashlib.sha256(json.dumps([config, shapes]).encode()).hexdigest()[:8]
    folder = parent / f"{model_type}-{gigabytes:g}GB-{digest}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as scratch:
        # Atomic: an interrupted write leaves nothing that looks like a checkpoint.
        target = Path(scratch) / "checkpoint"
        target.mkdir()
        _write(target, config, shapes)
        if not folder.is_dir():  # another process may have been faster
            target.rename(folder)
    return folder


def files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def config_and_shapes(model_type: str, gigabytes: float) -> tuple[dict[str, Any], Shapes]:
    """The config and all shapes of the largest checkpoint of at most `gigabytes`, with at least one layer."""
    for divisor in (1, 2, 4, 8, 16):
        sizes = [_nbytes(LAYOUTS[model_type](layers, divisor)[1]) for layers in (0, 1)]
        layers = int((gigabytes * 1e9 - sizes[0]) / (sizes[1] - sizes[0]))
        if layers >= 1:
            break
    config, shapes = LAYOUTS[model_type](max(layers, 1), divisor)
    return {"model_type": model_type.partition("-")[0], "dtype": "bfloat16", **config}, shapes


def _llama(layers: int, divisor: int, vocabulary: int = 32000) -> tuple[dict[str, Any], Shapes]:
    hidden, inner, vocabulary = _divided(divisor, 4096, 14336, vocabulary)
    shapes = _ends(hidden, vocabulary)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= _attention(prefix, hidden, heads=32, kv_heads=8, head_dim=hidden // 32)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
    return _config("LlamaForCausalLM", layers, hidden, inner, vocabulary, 32, 8), shapes


def _mixtral(layers: int, divisor: int) -> tuple[dict[str, Any], Shapes]:
    """Separate matrices per expert; transformers merges them while loading."""
    hidden, inner, vocabulary = _divided(divisor, 4096, 14336, 32000)
    shapes = _ends(hidden, vocabulary)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= _attention(prefix, hidden, heads=32, kv_heads=8, head_dim=hidden // 32)
        shapes[f"{prefix}.block_sparse_moe.gate.weight"] = (8, hidden)
        for expert in range(8):
            shapes[f"{prefix}.block_sparse_moe.experts.{expert}.w1.weight"] = (inner, hidden)
            shapes[f"{prefix}.block_sparse_moe.experts.{expert}.w2.weight"] = (hidden, inner)
            shapes[f"{prefix}.block_sparse_moe.experts.{expert}.w3.weight"] = (inner, hidden)
    config = _config("MixtralForCausalLM", layers, hidden, inner, vocabulary, 32, 8)
    return {**config, "num_local_experts": 8, "num_experts_per_tok": 2}, shapes


def _phi3(layers: int, divisor: int) -> tuple[dict[str, Any], Shapes]:
    """Query, key and value fused in one matrix, gate and up in another."""
    hidden, inner, vocabulary = _divided(divisor, 3072, 8192, 32064)
    shapes = _ends(hidden, vocabulary)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= _norms(prefix, hidden)
        shapes[f"{prefix}.self_attn.qkv_proj.weight"] = (3 * hidden, hidden)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}.mlp.gate_up_proj.weight"] = (2 * inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
    config = _config("Phi3ForCausalLM", layers, hidden, inner, vocabulary, 32, 32)
    return {**config, "pad_token_id": 0}, shapes


def _gpt_oss(layers: int, divisor: int) -> tuple[dict[str, Any], Shapes]:
    """All experts in one tensor, (experts, in, out), with biases."""
    hidden, vocabulary = _divided(divisor, 2880, 201088)
    inner, experts, heads, kv_heads, head_dim = hidden, 32, 64, 8, max(64 // divisor, 8)
    shapes = _ends(hidden, vocabulary)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        attention = _attention(prefix, hidden, heads, kv_heads, head_dim)
        biases = {name[:-6] + "bias": shape[:1] for name, shape in attention.items() if "_proj" in name}
        shapes |= attention | biases | {f"{prefix}.self_attn.sinks": (heads,)}
        shapes[f"{prefix}.mlp.router.weight"] = (experts, hidden)
        shapes[f"{prefix}.mlp.router.bias"] = (experts,)
        shapes[f"{prefix}.mlp.experts.gate_up_proj"] = (experts, hidden, 2 * inner)
        shapes[f"{prefix}.mlp.experts.gate_up_proj_bias"] = (experts, 2 * inner)
        shapes[f"{prefix}.mlp.experts.down_proj"] = (experts, inner, hidden)
        shapes[f"{prefix}.mlp.experts.down_proj_bias"] = (experts, hidden)
    config = _config("GptOssForCausalLM", layers, hidden, inner, vocabulary, heads, kv_heads)
    return {**config, "head_dim": head_dim, "num_local_experts": experts, "num_experts_per_tok": 4}, shapes


def _llama_fp8(layers: int, divisor: int) -> tuple[dict[str, Any], Shapes]:
    """Llama's linears in float8, with a scale for every block of 128 x 128."""
    config, shapes = _llama(layers, divisor)
    for name, (rows, columns) in [(name, shape) for name, shape in shapes.items() if "_proj" in name]:
        shapes[f"{name}{SCALE}"] = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": ["lm_head", "embed_tokens"],
    }
    return config | {"quantization_config": settings}, shapes


def _gpt_oss_mxfp4(layers: int, divisor: int) -> tuple[dict[str, Any], Shapes]:
    """Two values a byte, (experts, out, in / 32, 16), and an exponent for every 32."""
    config, shapes = _gpt_oss(layers, divisor)
    for name in [name for name in shapes if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = shapes.pop(name)
        shapes[f"{name}{BLOCKS}"] = (experts, rows, columns // 32, 16)
        shapes[f"{name}{EXPONENTS}"] = (experts, rows, columns // 32)
    return config | {"quantization_config": {"quant_method": "mxfp4"}}, shapes


LAYOUTS: dict[str, Callable[[int, int], tuple[dict[str, Any], Shapes]]] = {
    "llama": _llama,
    "llama-8b": partial(_llama, vocabulary=128256),  # Llama 3.1 8B in 32 layers, 16.1 GB
    "mixtral": _mixtral,
    "phi3": _phi3,
    "gpt_oss": _gpt_oss,
    "llama-fp8": _llama_fp8,
    "gpt_oss-mxfp4": _gpt_oss_mxfp4,
}
"""Model type, with its format if quantised -> function of (layers, divisor of the widths) to (config, shapes)."""


def _divided(divisor: int, *widths: int) -> tuple[int, ...]:
    """Widths to divide; the results stay multiples of 64."""
    return tuple(width if divisor == 1 else max(64, width // divisor // 64 * 64) for width in widths)


def _config(
    architecture: str, layers: int, hidden: int, inner: int, vocabulary: int, heads: int, kv_heads: int
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _ends(hidden: int, vocabulary: int) -> Shapes:
    return {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }


def _norms(prefix: str, hidden: int) -> Shapes:
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def _attention(prefix: str, hidden: int, heads: int, kv_heads: int, head_dim: int) -> Shapes:
    return _norms(prefix, hidden) | {
        f"{prefix}.self_attn.q_proj.weight": (heads * head_dim, hidden),
        f"{prefix}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        f"{prefix}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads * head_dim),
    }


def _nbytes(shapes: Shapes) -> int:
    return sum(_size(name, shapes) for name in shapes)


def _size(name: str, shapes: Shapes) -> int:
    """Bytes of a tensor."""
    return math.prod(shapes[name]) * _WIDTHS[_dtype(name, shapes)]


_WIDTHS = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
"""Item sizes by dtype names of safetensors."""


def _dtype(name: str, shapes: Shapes) -> str:
    """A tensor's dtype, from its name and the other names."""
    if name.endswith(SCALE):
        return "F32"
    if name.endswith((BLOCKS, EXPONENTS)):
        return "U8"
    return "F8_E4M3" if name + SCALE in shapes else "BF16"


def _write(folder: Path, config: dict[str, Any], shapes: Shapes) -> None:
    """Write files with transformers' names, tensors in a file by name, and the index."""
    groups: list[list[str]] = [[]]
    for name in shapes:
        if groups[-1] and sum(_size(other, shapes) for other in (*groups[-1], name)) > FILE_BYTES:
            groups.append([])
        groups[-1].append(name)
    weight_map = {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        _write_file(folder / file, sorted(names), shapes, seed=number)
    index = {"metadata": {"total_size": _nbytes(shapes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _write_file(path: Path, names: list[str], shapes: Shapes, seed: int) -> None:
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + _size(name, shapes)
        header[name] = {"dtype": _dtype(name, shapes), "shape": shapes[name], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            kind = EXPONENTS if name.endswith(EXPONENTS) else _dtype(name, shapes)
            for chunk in _random_weights(_size(name, shapes), kind, generator):
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())  # dirty pages cannot be dropped from the page cache


def _random_weights(nbytes: int, kind: str, generator: Any) -> Iterator[memoryview]:
    """Random bytes of a dtype, or of exponents.

    bf16 and float32 have random signs and magnitudes between 2^-7 and 2^-6: as small as weights, and none zero. float8
    is below 2; exponents are 2^-8 to 2^-5.
    """
    import torch

    bits = torch.empty(_CHUNK // 8, dtype=torch.int64)
    while nbytes:
        bits.random_(-(2**63), None, generator=generator)
        if kind == "BF16":
            bits.view(torch.int16).bitwise_and_(0x007F - 0x8000).bitwise_or_(120 << 7)  # the exponent is set
        elif kind == "F32":
            bits.view(torch.int32).bitwise_and_(0x007FFFFF).bitwise_or_(120 << 23)
        elif kind == "F8_E4M3":
            bits.view(torch.uint8).bitwise_and_(0xBF)
        elif kind == EXPONENTS:
            bits.view(torch.uint8).bitwise_and_(3).add_(119)
        count = min(nbytes, _CHUNK)
        yield memoryview(bits.numpy()).cast("B")[:count]
        nbytes -= count
