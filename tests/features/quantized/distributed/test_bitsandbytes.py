"""Checkpoints that bitsandbytes itself has quantised, against what it dequantises; where the library is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

import tp_transformers
from tests.features.packed.distributed.test_packed_saves import check_saved, save
from tests.features.quantized.distributed.test_quantized import check_packed
from tests.support.comparisons import different_tensors, full_parameters
from tests.support.models import llama_config, load

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
}


def quantise(folder: Path, kind: str, columns: int = 128) -> dict[str, torch.Tensor]:
    """Write a quantised checkpoint; returns the weights that the library makes of it."""
    torch.manual_seed(0)
    config = llama_config(8, 2, hidden_size=columns, head_dim=16, intermediate_size=192)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "plain")
    asked = BitsAndBytesConfig(**KINDS[kind])
    model = AutoModelForCausalLM.from_pretrained(
        folder / "plain", quantization_config=asked, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    model.save_pretrained(folder / "packed")
    return {name: param.detach() for name, param in model.dequantize(dtype=torch.bfloat16).named_parameters()}


def check_decoded(folder: str, expected: dict[str, torch.Tensor]) -> None:
    """Run on every rank: decoded weights beside those of the library, and a model whose weights stay packed."""
    dense, packed = check_packed(folder)
    assert different_tensors(full_parameters(dense), expected) == []
    assert packed.tp_report.fallbacks == ()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_library(pool, tmp_path, kind, size) -> None:
    expected = quantise(tmp_path, kind)
    pool.run(size, check_decoded, str(tmp_path / "packed"), expected)
    pool.run(size, save, str(tmp_path / "packed"), str(tmp_path / "saved"), str(tmp_path / "sharded"))
    check_saved(tmp_path / "packed", tmp_path / "saved")
    pool.run(4 - size, save, str(tmp_path / "sharded"), str(tmp_path / "again"))
    check_saved(tmp_path / "packed", tmp_path / "again")


def test_blocks_that_cross_rows_are_refused(tmp_path) -> None:
    quantise(tmp_path, "nf4", columns=96)
    with pytest.raises(tp_transformers.UnsupportedError, match="cross the rows"):
        load(tmp_path / "packed")
