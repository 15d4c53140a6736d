"""Checkpoints in MXFP4 and compressed-tensors, dequantised while they are loaded, on real ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config, Qwen3MoeConfig

import tp_transformers
from tests.support import quantized
from tests.support.models import bytes_read, headers, llama_config, load, read_folder
from tests.support.tiers import wide

pytestmark = pytest.mark.distributed

SIZES = {
    "vocab_size": 99,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    # 3 groups of 32 columns of the hidden states, 7 of the features between.
    "llama": lambda: llama_config(6, 2, hidden_size=96, head_dim=16, intermediate_size=224),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES,
        intermediate_size=96,
        moe_intermediate_size=96,
        num_attention_heads=6,
        num_experts=3,
        num_experts_per_tok=2,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES,
        intermediate_size=160,
        num_attention_heads=6,
        num_local_experts=3,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "mxfp4": {},
    "int4 by groups": {"bits": 4, "group": 32},
    "int4 with zero points": {"bits": 4, "group": 32, "symmetric": False},
    "int8 by rows": {"bits": 8},
    "int5 by rows with zero points": {"bits": 5, "symmetric": False},
    "int3 by groups": {"bits": 3, "group": 32},
}
FLOATING = ("embed_tokens", "lm_head", "mlp.gate.", "norm", "router", "sinks", "bias")
"""Parts of names of what is not quantised; in MXFP4 the attention is not either."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """`folders(name, variant)`: a quantised checkpoint, and one of the same values in floating point."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(name: str, variant: str) -> tuple[Path, Path]:
        if (name, variant) not in made:
            folder = tmp_path_factory.mktemp("quantised")
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16).save_pretrained(folder / "plain")
            if variant == "mxfp4":
                quantized.mxfp4(folder / "plain", folder / "packed")
            else:
                expected = quantized.compressed(folder / "plain", folder / "packed", **VARIANTS[variant])
                tensors = read_folder(folder / "plain") | expected
                save_file(tensors, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
            made[name, variant] = folder / "packed", folder / "plain"
        return made[name, variant]

    return make


def compare(packed: str, plain: str, variant: str, dtype: torch.dtype) -> dict[str, Any]:
    """Load the quantised checkpoint, and what one process of transformers makes of it, or the same values plainly."""
    if variant == "mxfp4":
        undone = Mxfp4Config(dequantize=True)
        reference = AutoModelForCausalLM.from_pretrained(packed, dtype=dtype, quantization_config=undone)
    else:
        reference = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
    model, whole = load(packed, dtype=dtype), dict(reference.named_parameters())
    mine = {name: tp_transformers.full_tensor(param) for name, param in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    return {
        "differ": [name for name in whole | mine if not torch.equal(whole[name].to(dtype), mine[name])],
        "read": bytes_read(model) - headers(packed),
        "expected": sum(file_bytes(name, tensor, variant) for name, tensor in state.items()),
        "fallbacks": model.tp_report.fallbacks,
    }


def file_bytes(name: str, param: torch.Tensor, variant: str) -> int:
    """Bytes that a rank's shard of a parameter has in the files: its words, and the scales of all it touches."""
    shard = getattr(param, "tp_shard", None)
    if shard is None:  # a buffer
        return param.numel() * 4
    held = [set(range(length)) for length in shard.shape]
    if shard.layout is not None:
        held[shard.layout.dim] = {
            index for start, stop in shard.layout.split.ranges[shard.group.rank] for index in range(start, stop)
        }
    if any(part in name for part in FLOATING) or (variant == "mxfp4" and "experts" not in name):
        return 2 * math.prod(map(len, held))
    if variant == "mxfp4":
        experts, columns, rows = map(len, held)
        touched = {column // 32 for column in held[1]}
        pairs = {column // 2 for column in held[1]}
        assert columns == 2 * len(pairs)
        return experts * rows * (len(pairs) + len(touched))
    *experts, rows, columns = held
    count = len(experts[0]) if experts else 1
    parts, length = [rows], shard.shape[-2]
    if name.endswith("gate_up_proj"):  # two tensors of every expert
        length //= 2
        parts = [{row for row in rows if row < length}, {row - length for row in rows if row >= length}]
    settings = {"group": None, "symmetric": True, **VARIANTS[variant]}
    bits, group = settings["bits"], settings["group"] or shard.shape[-1]
    values, width = quantized.unit(bits)
    words = len({column // values for column in columns}) * width
    groups = len({column // group for column in columns})
    return count * sum(
        4 * len(part) * words
        + 2 * len(part) * groups
        + (0 if settings["symmetric"] else 4 * groups * width * len({row // values for row in part}))
        + (0 if settings["group"] else 16)
        for part in parts
    )


@pytest.mark.parametrize(
    ("name", "variant", "size", "dtype"),
    wide(
        [
            ("gpt_oss", "mxfp4", 3, torch.bfloat16),
            ("llama", "int4 with zero points", 2, torch.bfloat16),
            ("qwen3_moe", "int8 by rows", 3, torch.float32),
            ("gpt_oss", "mxfp4", 1, torch.float32),
            ("gpt_oss", "mxfp4", 2, torch.float16),
            ("gpt_oss", "mxfp4", 4, torch.bfloat16),
            ("llama", "int4 by groups", 1, torch.bfloat16),
            ("llama", "int4 by groups", 4, torch.float32),
            ("llama", "int3 by groups", 3, torch.bfloat16),
            ("llama", "int5 by rows with zero points", 2, torch.bfloat16),
            ("qwen3_moe", "int4 with zero points", 4, torch.bfloat16),
        ],
        2,
    ),
)
def test_ranks_read_their_words_and_the_scales_of_their_groups(
    pool: Any, folders: Any, name: str, variant: str, size: int, dtype: torch.dtype
) -> None:
    packed, plain = folders(name, variant)
    for rank in pool.run(size, compare, str(packed), str(plain), variant, dtype):
        assert rank["differ"] == []
        assert rank["read"] == rank["expected"]
        assert rank["fallbacks"] == ()
