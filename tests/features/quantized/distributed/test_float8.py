"""Checkpoints in FP8, dequantised while they are loaded, on real ranks."""

from __future__ import annotations

import logging
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from tests.features.quantized.distributed.test_quantized import (
    check_errors,
    held_by,
    matrices,
    packed_errors,
    packed_folder,
)
from tests.support.comparisons import assert_same_files, different_tensors, full_parameters
from tests.support.float8 import NOT_CONVERTED, quantize_folder
from tests.support.models import bytes_read, headers, llama_config, load
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide

BLOCK = (16, 16)
SIZES = {
    "vocab_size": 99,
    "hidden_size": 72,
    "intermediate_size": 100,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "max_position_embeddings": 64,
}
QWEN = Qwen3MoeConfig(**SIZES, num_key_value_heads=3, head_dim=8, num_experts=3, num_experts_per_tok=2)
DEEPSEEK = DeepseekV3Config(
    **SIZES,
    num_key_value_heads=9,
    q_lora_rank=24,
    kv_lora_rank=20,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
CONFIGS = {"llama": llama_config(9, 3), "qwen3_moe": QWEN, "deepseek_v3": DEEPSEEK}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """`folders(name)`: a checkpoint in FP8, and the same dequantised, in one file."""

    @cache
    def make(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder / "plain")
        expected = quantize_folder(folder / "plain", folder / "float8", BLOCK)
        save_file(expected, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
        return folder / "float8", folder / "plain"

    return make


def load_and_save(folder: str, plain: str, dtype: torch.dtype, saved: str) -> dict[str, Any]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger, level = logging.getLogger("tp_transformers"), logging.getLogger("tp_transformers").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = load(folder, dtype=dtype)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    model.save_pretrained(saved)
    whole = dict(AutoModelForCausalLM.from_pretrained(plain, dtype=dtype).named_parameters())
    return {
        "differ": different_tensors(full_parameters(model), whole),
        "dtypes": {param.dtype for param in model.parameters()},
        "read": bytes_read(model) - headers(folder),
        "expected": sum(file_bytes(name, tensor) for name, tensor in model.state_dict(keep_vars=True).items()),
        "quantised": hasattr(model.config, "quantization_config"),
        "fallbacks": model.tp_report.fallbacks,
        "notes": [(record.levelname, record.getMessage()) for record in records],
    }


def file_bytes(name: str, param: torch.Tensor) -> int:
    """Bytes that a rank's shard of a parameter has in the files: its values, and the scales of all it touches."""
    if not hasattr(param, "tp_shard"):  # a buffer
        return param.numel() * 4
    if param.ndim < 2 or any(part in name.split(".")[-2:] or f"{part}." in name for part in NOT_CONVERTED):
        return 4 * math.prod(map(len, held_by(param)))
    count, parts, columns = matrices(name, param)
    return count * sum(
        len(part) * len(columns) + 4 * len({row // BLOCK[0] for row in part}) * len({c // BLOCK[1] for c in columns})
        for part in parts
    )


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    wide(
        [
            ("llama", 2, torch.bfloat16),
            ("llama", 3, torch.float32),
            ("qwen3_moe", 2, torch.bfloat16),
            ("deepseek_v3", 3, torch.bfloat16),
        ],
        1,
    ),
)
def test_ranks_read_their_values_and_the_scales_of_their_blocks(pool, folders, tmp_path, name, size, dtype) -> None:
    quantised, plain = folders(name)
    ranks = pool.run(size, load_and_save, str(quantised), str(plain), dtype, str(tmp_path / "saved"))
    for rank in ranks:
        assert rank["differ"] == []
        assert rank["read"] == rank["expected"]
        assert rank["quantised"] is False
        assert rank["fallbacks"] == ()
    # A save is an ordinary one.
    whole = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
    whole.save_pretrained(tmp_path / "expected")
    assert_same_files(str(tmp_path / "expected"), str(tmp_path / "saved"))
    # One rank says what it costs, and what the load did.
    (warned, cost), (level, report) = (note for rank in ranks for note in rank["notes"])
    assert (warned, level) == ("WARNING", "INFO")
    assert cost.startswith(f"[rank 0/{size}] the checkpoint is in FP8, and dequantised")
    assert report.startswith(f"[rank 0/{size}] rank 0 of {size}: ")


@pytest.mark.parametrize(("name", "size"), wide([("qwen3_moe", 3), ("llama", 2)], 1))
@on_ranks()
def test_packed_blocks_of_many_rows_are_decoded_without_scales(of_large_blocks) -> None:
    model = load(of_large_blocks, dtype=torch.bfloat16, tp_dequantize=False)
    check_errors(packed_errors(of_large_blocks, load(of_large_blocks, dtype=torch.bfloat16), model))
    assert "fp8 decoded without scales" in " ".join(model.tp_report.products)


@pytest.fixture
def of_large_blocks(tmp_path: Path, name: str) -> str:
    """A checkpoint whose blocks have 64 rows."""
    return str(packed_folder(tmp_path, name, partial(quantize_folder, block=(64, 32)))[0])
