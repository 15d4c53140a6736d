"""State-space and linear-attention mixers on GPUs, by their fused kernels where these are installed."""

from typing import Any

import pytest
import torch
import transformers

from tests.support.comparisons import assert_as_one_process, compare_seen
from tests.support.devices import load_here, one_process
from tests.support.models import observe
from tests.support.tiers import wide
from tests.support.tiny_mixers import MIXERS

NAMES = ["mamba2", "qwen3_next", "falcon_h1", "bamba", "granitemoehybrid", "mamba", "jamba", "kimi_linear", "lfm2"]
"""Models that transformers computes by fused kernels on a GPU."""
# fp32 sums in another order, through a scan over positions; a delta net magnifies them.
TOLERANCE = 2e-3


def compare(kind: str, folder: str) -> dict[str, Any]:
    """Run on every rank: differences from one process on this device."""
    auto = getattr(transformers, kind)
    reference = observe(one_process(folder, auto, dtype=torch.float32))
    model = load_here(folder, auto, dtype=torch.float32)
    return compare_seen(model, observe(model), reference, noise=True)


@pytest.mark.parametrize("name", wide(NAMES, 1))
def test_a_mixer_is_that_of_one_process(pool, tmp_path, name) -> None:
    model = MIXERS[name].make(8, 2).float()
    model.save_pretrained(tmp_path)
    for found in pool.run(2, compare, type(model).__name__, str(tmp_path)):
        print(found)
        assert_as_one_process(found, TOLERANCE, 10 * TOLERANCE)
