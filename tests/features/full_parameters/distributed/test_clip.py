"""torch's own clipping of a tensor-parallel model, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import utils

from tests.support.comparisons import full_gradients, relative_errors
from tests.support.models import PROMPTS, load_both
from tests.support.on_ranks import on_ranks

TOLERANCE = 1e-5  # fp32 sums in another order
MAX_NORM = 0.1


def clip(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The norm before clipping, and the full gradients after it."""
    model(PROMPTS, labels=PROMPTS).loss.backward()
    norm = utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return norm.item(), full_gradients(model)


# DTensors beside plain parameters, plain parameters alone, KV heads that ranks share.
@pytest.mark.parametrize(("heads", "size"), [((8, 4), 2), ((8, 4), 3), ((8, 1), 2)])
@on_ranks()
def test_torch_clips_by_the_norm_of_the_whole_model(folder) -> None:
    (norm, found), (expected, grads) = map(clip, load_both(folder))
    assert expected > MAX_NORM, "there is something to clip"
    assert abs(norm - expected) < TOLERANCE * expected
    assert max(relative_errors(found, grads).values()) < 10 * TOLERANCE


def test_other_parameters_are_clipped_by_torch() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 2.0)
    assert utils.clip_grad_norm_([weight], 1.0).item() == pytest.approx(12**0.5)
