"""Quantised checkpoints from a Hub on the loopback, which stay packed: every byte once, and few requests."""

import pytest
import torch

from tests.features.packed.distributed.test_packed_saves import check_saved
from tests.features.quantized.distributed.test_quantized import VARIANTS, packed_folder
from tests.support.hub import stored_weights, weight_bytes
from tests.support.models import load, logits_of
from tests.support.tiers import wide


def stream_packed(name: str, folder: str, cache: str, saved: str) -> bool:
    streamed = load(name, tp_stream=True, cache_dir=cache, dtype=torch.bfloat16, tp_dequantize=False)
    streamed.save_pretrained(saved)
    local = load(folder, dtype=torch.bfloat16, tp_dequantize=False)
    return torch.equal(logits_of(streamed), logits_of(local))


@pytest.mark.parametrize(
    ("name", "variant", "size"),
    wide(
        [("llama", "gptq in order", 2), ("llama", "int8 by rows", 3), ("gpt_oss", "mxfp4", 2), ("qwen3_moe", "awq", 2)],
        1,
    ),
)
def test_packed_bytes_travel_once(hub_pool, served, tmp_path, name, variant, size) -> None:
    folder, _ = packed_folder(tmp_path / "base", name, VARIANTS[variant])
    served.add("org/model", folder)
    arguments = ("org/model", str(folder), str(tmp_path / "cache"), str(tmp_path / "saved"))
    assert all(hub_pool.run(size, stream_packed, *arguments))
    assert 0.95 < served.weights_sent() / weight_bytes(folder) < 1.05
    assert stored_weights(tmp_path / "cache") == []
    ranges = [seen.headers["Range"] for seen in served.seen if seen.is_weights]
    assert len(ranges) == len(set(ranges)), "no range is fetched twice"
    check_saved(folder, tmp_path / "saved")
