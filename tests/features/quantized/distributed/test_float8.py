"""Checkpoints in FP8, dequantised while they are loaded, on real ranks."""

from __future__ import annotations

import logging
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from tests.features.quantized.distributed.test_quantized import (
    check_packed,
    held_by,
    matrices,
    packed_folder,
)
from tests.support.comparisons import assert_same_files, different_tensors, full_parameters
from tests.support.float8 import NOT_CONVERTED, quantize_folder
from tests.support.logged import logged
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
@on_ranks()
def test_ranks_read_their_values_and_the_scales_of_their_blocks(both, tmp_path, dtype) -> None:
    quantised, plain = both
    with logged(level=logging.INFO) as notes:
        model = load(quantised, dtype=dtype)
    whole = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
    assert different_tensors(full_parameters(model), dict(whole.named_parameters())) == []
    state = model.state_dict(keep_vars=True)
    expected = sum(file_bytes(name, tensor) for name, tensor in state.items())
    assert bytes_read(model) - headers(quantised) == expected
    assert not hasattr(model.config, "quantization_config")
    assert model.tp_report.fallbacks == ()
    # A save is an ordinary one.
    model.save_pretrained(tmp_path / "saved")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        whole.save_pretrained(tmp_path / "expected")
    dist.barrier()
    assert_same_files(tmp_path / "expected", tmp_path / "saved")
    # One rank warns of what it costs, and says what the load did.
    with logged(level=logging.WARNING) as warned:
        load(quantised, dtype=dtype)
    if rank:
        assert notes == warned == []
    else:
        cost, report = notes
        assert warned == [cost]
        assert cost.startswith(f"[rank 0/{size}] the checkpoint is in FP8, and dequantised")
        assert report.startswith(f"[rank 0/{size}] rank 0 of {size}: ")


@pytest.fixture
def both(folders: Any, name: str) -> tuple[Path, Path]:
    """Both folders of a test."""
    return folders(name)


@pytest.mark.parametrize(("name", "size"), wide([("qwen3_moe", 3), ("llama", 2)], 1))
@on_ranks()
def test_packed_blocks_of_many_rows_are_decoded_without_scales(of_large_blocks) -> None:
    _, model = check_packed(of_large_blocks)
    assert "fp8 decoded without scales" in " ".join(model.tp_report.products)


@pytest.fixture
def of_large_blocks(tmp_path: Path, name: str) -> str:
    """A checkpoint whose blocks have 64 rows."""
    return str(packed_folder(tmp_path, name, partial(quantize_folder, block=(64, 32)))[0])
