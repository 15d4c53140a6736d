"""torch's own clipping of a tensor-parallel model, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import utils

import tp_transformers
from tests.support.comparisons import relative
from tests.support.models import PROMPTS, load
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5  # fp32 sums in another order
MAX_NORM = 0.1


def clip(folder: str, plan: str | None) -> tuple[float, dict[str, torch.Tensor]]:
    """The norm before clipping, and the whole gradients after it."""
    model = load(folder, tp_plan=plan)
    model(PROMPTS, labels=PROMPTS).loss.backward()
    norm = utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    whole = tp_transformers.full_tensor if plan else (lambda param, grad: grad)
    return norm.item(), {name: whole(param, param.grad) for name, param in model.named_parameters()}


# DTensors beside plain parameters, plain parameters alone, KV heads that ranks share.
@pytest.mark.parametrize(("heads", "size"), [((8, 4), 2), ((8, 4), 3), ((8, 1), 2)])
def test_torch_clips_by_the_norm_of_the_whole_model(pool: Pool, cases: Any, heads: tuple[int, int], size: int) -> None:
    folder = cases(*heads).folder
    expected, grads = clip(folder, None)
    assert expected > MAX_NORM, "there is something to clip"
    for norm, found in pool.run(size, _clip_on_ranks, folder):
        assert abs(norm - expected) < TOLERANCE * expected
        assert max(relative(found[name], grads[name]) for name in grads) < 10 * TOLERANCE


def _clip_on_ranks(folder: str) -> tuple[float, dict[str, torch.Tensor]]:
    return clip(folder, "auto")


def test_other_parameters_are_clipped_by_torch() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 2.0)
    assert utils.clip_grad_norm_([weight], 1.0).item() == pytest.approx(12**0.5)
