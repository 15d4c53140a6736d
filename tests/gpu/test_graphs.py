"""Decode steps with a static cache: as a CUDA graph, compiled, and without the host waiting for the GPU."""

from typing import Any

import pytest

from benchmarks.gpu.decoding import Decoder
from benchmarks.gpu.device import device_of
from tests.support.devices import DEVICE, SHARES_A_GPU, load_here, one_process
from tests.support.tiers import wide

STEPS = 6
MODES = ["graph", "compiled"]


def decode(folder: str, mode: str) -> dict[str, Any]:
    """Run on every rank: greedy tokens of the mode, and of one process; times that the host waited in a step."""
    device = device_of(DEVICE)
    plain = Decoder(one_process(folder), device, batch=2, prompt=5, room=32)
    expected = plain.tokens(plain.eager(), STEPS)
    ours = Decoder(load_here(folder), device, batch=2, prompt=5, room=32)
    return {
        "expected": expected.tolist(),
        "tokens": ours.tokens(getattr(ours, mode)(), STEPS).tolist(),
        "waits": device.host_waits(ours.eager()),
    }


@pytest.mark.parametrize("mode", wide(MODES, 1))
def test_decode_steps_write_the_same_tokens(pool, cases, mode) -> None:
    size = 1 if SHARES_A_GPU else 2  # gloo's sums on the host cannot be captured
    for found in pool.run(size, decode, cases(9, 3).folder, mode):
        assert found["tokens"] == found["expected"]
        assert found["waits"] == 0
