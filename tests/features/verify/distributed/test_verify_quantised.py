"""`verify` of configs of quantised checkpoints: a plan is proven in floating point, or the format refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, LlamaConfig, Qwen3Config

from tests.support.tiers import wide
from tp_transformers import UnsupportedError
from tp_transformers.features.verify import rank
from tp_transformers.verify import verify

pytestmark = pytest.mark.distributed

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1000,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
COMPRESSED = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}}


@pytest.mark.parametrize(
    ("settings", "title"),
    wide(
        [
            ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
            ({"quant_method": "awq", "bits": 4}, "AWQ"),
            ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8"),
            ({"quant_method": "mxfp4"}, "MXFP4"),
            ({"quant_method": "compressed-tensors", "format": "pack-quantized", **COMPRESSED}, "compressed-tensors"),
            ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ],
        1,
    ),
)
def test_a_quantised_config_is_proven_in_floating_point(pool: Any, settings: dict[str, Any], title: str) -> None:
    def launch(folder: Path, reports: Path, size: int, timeout: float) -> int:
        pool.run(size, rank.run_rank, folder, reports, time.time() + timeout, timeout=timeout)
        return 0

    experts = {"num_local_experts": 4} if title == "MXFP4" else {}
    config = (GptOssConfig if experts else Qwen3Config)(**SIZES, **experts, quantization_config=settings)
    (verdict,) = verify(config, launch=launch)
    assert verdict.ok, verdict.faults
    assert verdict.logits is not None
    assert verdict.tokens
    assert any(f"without its {title}" in note for note in verdict.notes)
    assert config.quantization_config == settings


def test_a_config_that_a_load_refuses_is_refused() -> None:
    config = LlamaConfig(**SIZES, quantization_config={"quant_method": "awq", "bits": 4, "version": "gemv"})
    with pytest.raises(UnsupportedError, match="AWQ in 4 bits, in the version gemv"):
        verify(config)
