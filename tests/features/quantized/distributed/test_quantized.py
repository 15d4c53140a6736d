"""Quantised checkpoints on real ranks: dequantised while they are loaded, and packed in memory."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config, Qwen3MoeConfig

import tp_transformers
from tests.support import quantized
from tests.support.comparisons import different_tensors, full_parameters, read_folder, relative
from tests.support.models import bytes_read, headers, llama_config, load, logits_of
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.features.packed.tiled import DECODED
from tp_transformers.features.packed.weight import packed_weights
from tp_transformers.loading import memory

SIZES = {
    "vocab_size": 211,
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
VARIANTS: dict[str, Callable[[Path, Path], quantized.Tensors]] = {
    "mxfp4": quantized.mxfp4,
    "int4 by groups": partial(quantized.compressed, bits=4, group=32),
    "int4 with zero points": partial(quantized.compressed, bits=4, group=32, symmetric=False),
    "int8 by rows": partial(quantized.compressed, bits=8),
    "int5 by rows with zero points": partial(quantized.compressed, bits=5, symmetric=False),
    "int3 by groups": partial(quantized.compressed, bits=3, group=32),
    "gptq": quantized.gptq,
    "gptq in order": partial(quantized.gptq, bits=8, desc_act=True, version="gptq_v2"),
    "awq": quantized.awq,
    "nvfp4": partial(quantized.small_groups, form="nvfp4-pack-quantized"),
    "mxfp4 of linears": partial(quantized.small_groups, form="mxfp4-pack-quantized"),
    "mxfp8": partial(quantized.small_groups, form="mxfp8-quantized"),
    "nvfp4 of ModelOpt": partial(quantized.modelopt, form="nvfp4"),
}
OPERATORS = ("int4 by groups", "int4 with zero points", "int8 by rows", "gptq", "awq")
"""Variants that an operator multiplies in bfloat16."""
FLOATING = ("embed_tokens", "lm_head", "mlp.gate.", "norm", "router", "sinks", "bias")
"""Parts of names of what is not quantised; in MXFP4 the attention is not either."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """`folders(name, variant)`: a quantised checkpoint, and one of the same values in floating point."""
    return cache(lambda name, variant: packed_folder(tmp_path_factory.mktemp("quantised"), name, VARIANTS[variant]))


@pytest.fixture
def checkpoints(folders: Any, name: str, variant: str) -> tuple[str, str]:
    """Both folders of a test."""
    packed, plain = folders(name, variant)
    return str(packed), str(plain)


def packed_folder(folder: Path, name: str, quantize: Callable[[Path, Path], quantized.Tensors]) -> tuple[Path, Path]:
    """A quantised checkpoint of a config, and one of the same values in floating point."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16).save_pretrained(folder / "plain")
    expected = quantize(folder / "plain", folder / "packed")
    tensors = read_folder(folder / "plain") | expected
    save_file(tensors, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    return folder / "packed", folder / "plain"


def check_decoded(packed: str, plain: str, variant: str, dtype: torch.dtype) -> None:
    """Run on every rank: weights are what one process of transformers makes of them, or those of the plain checkpoint.

    A rank reads the words of its shards, and the scales of their groups.
    """
    if variant == "mxfp4":
        undone = Mxfp4Config(dequantize=True)
        reference = AutoModelForCausalLM.from_pretrained(packed, dtype=dtype, quantization_config=undone)
    else:
        reference = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
    model = load(packed, dtype=dtype)
    expected = {name: param.to(dtype) for name, param in reference.named_parameters()}
    nbytes = sum(file_bytes(name, each, variant) for name, each in model.state_dict(keep_vars=True).items())
    assert different_tensors(full_parameters(model), expected) == []
    assert bytes_read(model) - headers(packed) == nbytes
    assert model.tp_report.fallbacks == ()


def held_by(param: torch.Tensor) -> list[set[int]]:
    """By dimension, the indices that this rank's shard has of a parameter."""
    shard = param.tp_shard
    held = [set(range(length)) for length in shard.shape]
    if shard.layout is not None:
        held[shard.layout.dim] = {
            index for start, stop in shard.layout.split.ranges[shard.group.rank] for index in range(start, stop)
        }
    return held


def matrices(name: str, param: torch.Tensor) -> tuple[int, list[set[int]], set[int]]:
    """The stored matrices of a parameter: a number of them for each set of rows, with these columns."""
    *experts, rows, columns = held_by(param)
    parts, length = [rows], param.tp_shard.shape[-2] // 2
    if name.endswith("gate_up_proj"):  # two tensors of every expert
        parts = [{row for row in rows if row < length}, {row - length for row in rows if row >= length}]
    return len(experts[0]) if experts else 1, parts, columns


def file_bytes(name: str, param: torch.Tensor, variant: str) -> int:
    """Bytes that a rank's shard of a parameter has in the files: its words, and the scales of all it touches."""
    shard = getattr(param, "tp_shard", None)
    if shard is None:  # a buffer
        return param.numel() * 4
    held = held_by(param)
    if any(part in name for part in FLOATING) or (variant == "mxfp4" and "experts" not in name):
        return 2 * math.prod(map(len, held))
    if variant == "mxfp4":
        experts, columns, rows = map(len, held)
        touched = {column // 32 for column in held[1]}
        pairs = {column // 2 for column in held[1]}
        assert columns == 2 * len(pairs)
        return experts * rows * (len(pairs) + len(touched))
    count, parts, columns = matrices(name, param)
    settings: dict[str, Any] = {"bits": 4, "group": None, "symmetric": True}
    if "form" in getattr(VARIANTS[variant], "keywords", {}):
        is_nv = variant.startswith("nvfp4")
        group = 16 if is_nv else 32
        width = len(columns) if variant == "mxfp8" else len({column // 2 for column in columns})
        groups = len({column // group for column in columns})
        return count * sum(len(part) * (width + groups) + 4 * is_nv for part in parts)
    settings |= getattr(VARIANTS[variant], "keywords", {})
    bits, group = settings["bits"], settings["group"] or shard.shape[-1]
    values, width = quantized.unit(bits)
    words = len({column // values for column in columns}) * width
    groups = len({column // group for column in columns})
    if variant == "awq" or variant.startswith("gptq"):
        ordered = "desc_act" in settings
        groups = shard.shape[-1] // 32 if ordered else len({column // 32 for column in columns})
        total = 0
        for part in parts:
            of_rows = len({row // values for row in part}) * width
            total += 4 * (len(columns) * of_rows if variant == "awq" else len(part) * words)
            total += groups * (2 * len(part) + 4 * of_rows) + 4 * shard.shape[-1] * (variant != "awq")
        return count * total
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
            ("llama", "gptq", 2, torch.float16),
            ("llama", "gptq", 3, torch.bfloat16),
            ("qwen3_moe", "gptq in order", 2, torch.bfloat16),
            ("llama", "gptq in order", 4, torch.float32),
            ("llama", "awq", 2, torch.float16),
            ("qwen3_moe", "awq", 3, torch.bfloat16),
            ("llama", "nvfp4", 3, torch.bfloat16),
            ("qwen3_moe", "nvfp4", 2, torch.bfloat16),
            ("llama", "mxfp4 of linears", 4, torch.bfloat16),
            ("llama", "mxfp8", 3, torch.float32),
            ("qwen3_moe", "nvfp4 of ModelOpt", 3, torch.bfloat16),
        ],
        2,
    ),
)
@on_ranks()
def test_ranks_read_their_words_and_the_scales_of_their_groups(checkpoints, variant, dtype) -> None:
    check_decoded(*checkpoints, variant, dtype)


def check_packed(folder: str | Path) -> tuple[Any, Any]:
    """Run on every rank: a packed model is exact in fp32; in bfloat16 it rounds like the dequantised one.

    Returns the dequantised and the packed model, in bfloat16.
    """
    dense, model = (load(folder, dtype=torch.bfloat16, **packed) for packed in ({}, {"tp_dequantize": False}))
    model.to("cpu")
    with torch.no_grad():
        exact = logits_of(load(folder, dtype=torch.float32))
        models = {"dense": dense, "packed": model, "copy": copy.deepcopy(model)}
        models["fp32"] = load(folder, dtype=torch.float32, tp_dequantize=False)
        errors = {name: relative(logits_of(each).float(), exact) for name, each in models.items()}
    assert errors["fp32"] < 1e-5, errors  # fp32 sums in another order
    assert 0 < errors["packed"] == errors["copy"] < 2 * errors["dense"], errors
    return dense, model


@pytest.mark.parametrize(
    ("name", "variant", "size"),
    wide(
        [
            ("gpt_oss", "mxfp4", 2),
            ("llama", "int4 with zero points", 3),
            ("qwen3_moe", "int8 by rows", 2),
            ("llama", "gptq in order", 3),
            ("qwen3_moe", "awq", 3),
            ("llama", "nvfp4", 3),
            ("llama", "mxfp8", 2),
            ("llama", "int4 by groups", 2),
            ("llama", "int8 by rows", 2),
            ("llama", "gptq", 3),
            ("llama", "awq", 3),
            ("qwen3_moe", "int4 with zero points", 3),
        ],
        2,
    ),
)
@on_ranks()
def test_packed_weights_compute_as_dequantised_ones(checkpoints, variant, size) -> None:
    folder, _ = checkpoints
    dense, model = check_packed(folder)
    held, read = model.tp_report.share, bytes_read(model) - headers(folder)
    assert held == model.get_memory_footprint(return_buffers=False) < dense.tp_report.share
    has_operators = any(weight.product != DECODED for weight in packed_weights(model).values())
    assert has_operators == (variant in OPERATORS)
    # Stored tensors have room for complete groups, and a rank reads its slice of them. An operator has scales and
    # zero points of its own: 5 bytes for a group of 32, which is 18 bytes, and rows in blocks of 32: a third of 64
    # rows takes two.
    assert held <= ((1.5 if size == 2 else 2) if has_operators else 1.1) * read
    assert model.num_parameters() == dense.num_parameters()
    for use in (model.state_dict, lambda: model.load_state_dict({}), lambda: model.to(torch.float64)):
        with pytest.raises(tp_transformers.UnsupportedError, match="tp_dequantize=True"):
            use()


def order_of_no_group(tensors: quantized.Tensors) -> None:
    tensors["model.layers.1.mlp.down_proj.g_idx"][5] = 7


def no_scales(tensors: quantized.Tensors) -> None:
    del tensors["model.layers.1.mlp.down_proj.scales"]


def load_unread(folder: str, dequantize: bool) -> None:
    """A load that fails in another way if it reads a weight."""
    with mock.patch.object(memory, "read_together", side_effect=AssertionError("a weight is read")):
        load(folder, tp_dequantize=dequantize)


@pytest.mark.parametrize(
    ("change", "says"),
    wide(
        [
            (order_of_no_group, "tensor model.layers.1.mlp.down_proj.g_idx: got groups from 0 to 7"),
            (no_scales, "tensor model.layers.1.mlp.down_proj.scales: got no such tensor"),
        ],
        1,
    ),
)
def test_all_ranks_refuse_members_that_do_not_fit_before_reading_weights(pool, folders, tmp_path, change, says) -> None:
    folder, _ = folders("llama", "gptq in order")
    tensors = read_folder(folder)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folder / "config.json", tmp_path)
    for dequantize in (True, False):
        assert f"CheckpointError: {says}" in pool.error(2, load_unread, str(tmp_path), dequantize)
