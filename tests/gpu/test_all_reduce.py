"""All-reduces by every way on GPUs: exact sums, and a model's logits; on a CPU, the ways fall back to the backend."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.support.comparisons import relative
from tests.support.devices import DEVICE, load_here, one_process, start
from tests.support.models import logits_of
from tests.support.pool import Pool
from tests.support.tiers import wide
from tp_transformers.ranks import direct
from tp_transformers.ranks.all_reduce.transport import VALUES, VARIABLE
from tp_transformers.ranks.mesh import join

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-4  # fp32 sums in another order


def summed(way: str, folder: str) -> float:
    """Run on every rank: sums of integers in place, some twice on one buffer, and the logits' error."""
    os.environ[VARIABLE] = way
    try:
        mesh = start()
        group = join(mesh).process_group
        assert group is not None
        rank, size = group.rank(), group.size()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            for length in (1, 7, 4096, 100_003, 10_000_000):
                x = (torch.arange(length, device=DEVICE) % 5).to(dtype)
                totals = [x * (rank + 1), x * (rank + 2)]
                for total in totals:
                    direct.all_reduce(total, group)
                factors = (size * (size + 1) // 2, size * (size + 3) // 2)
                for total, factor in zip(totals, factors, strict=True):
                    assert torch.equal(total, x * factor), (way, dtype, length)
        with torch.no_grad():
            return relative(logits_of(load_here(folder, mesh=mesh)), logits_of(one_process(folder)))
    finally:
        del os.environ[VARIABLE]


@pytest.mark.parametrize("way", wide(VALUES, 1))
def test_sums_are_exact(pool: Pool, cases: Any, way: str) -> None:
    for error in pool.run(2, summed, way, cases(9, 3).folder):
        assert error < TOLERANCE
