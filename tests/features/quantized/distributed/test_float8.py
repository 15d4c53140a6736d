"""Checkpoints in FP8, dequantised while they are loaded, on real ranks."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from tests.features.quantized.distributed.test_quantized import check_errors, packed_errors, packed_folder
from tests.support.comparisons import assert_same_files, different_tensors, full_parameters
from tests.support.float8 import NOT_CONVERTED, quantize_folder
from tests.support.models import bytes_read, headers, llama_config, load
from tests.support.tiers import wide

pytestmark = pytest.mark.distributed

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
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(CONFIGS[name])
            model.save_pretrained(folder / "plain")
            expected = quantize_folder(folder / "plain", folder / "float8", BLOCK)
            save_file(expected, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
            made[name] = folder / "float8", folder / "plain"
        return made[name]

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
    shard = getattr(param, "tp_shard", None)
    if shard is None:  # a buffer
        return param.numel() * 4
    held = [set(range(length)) for length in shard.shape]
    if shard.layout is not None:
        held[shard.layout.dim] = {
            index for start, stop in shard.layout.split.ranges[shard.group.rank] for index in range(start, stop)
        }
    *experts, rows, columns = [set(), *held] if len(held) == 1 else held
    if param.ndim < 2 or any(part in name.split(".")[-2:] or f"{part}." in name for part in NOT_CONVERTED):
        return len(rows or {0}) * len(columns) * 4
    count = len(experts[0]) if experts else 1
    parts = [rows]
    if name.endswith("gate_up_proj"):  # two tensors of every expert
        half = shard.shape[1] // 2
        parts = [{row for row in rows if row < half}, {row - half for row in rows if row >= half}]
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
def test_ranks_read_their_values_and_the_scales_of_their_blocks(
    pool: Any, folders: Any, tmp_path: Path, name: str, size: int, dtype: torch.dtype
) -> None:
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


def packed_products(folder: str) -> dict[str, Any]:
    model = load(folder, dtype=torch.bfloat16, tp_dequantize=False)
    errors = packed_errors(folder, load(folder, dtype=torch.bfloat16), model)
    return {"errors": errors, "products": model.tp_report.products}


@pytest.mark.parametrize(("name", "size"), wide([("qwen3_moe", 3), ("llama", 2)], 1))
def test_packed_blocks_of_many_rows_are_decoded_without_scales(pool: Any, tmp_path: Path, name: str, size: int) -> None:
    folder, _ = packed_folder(tmp_path, name, partial(quantize_folder, block=(64, 32)))
    for rank in pool.run(size, packed_products, str(folder)):
        check_errors(rank["errors"])
        assert "fp8 decoded without scales" in " ".join(rank["products"])
