"""A strategy of a user's own, taken word for word from the page of the strategies."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import tp_transformers
from tests.support.comparisons import assert_same_files, compare_seen
from tests.support.models import excess_read, load, observe
from tests.support.readme import STRATEGIES_PAGE

TOLERANCE = 1e-4  # fp32 sums in another order


def code() -> str:
    """The page's first strategy from scratch below `## A strategy of your own`."""
    section = STRATEGIES_PAGE.read_text().split("\n## A strategy of your own")[1]
    found: list[str] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return next(block for block in found if "partition_tensor" in block)


def with_the_strategy_of_the_page(folder: str, reference_file: str, saved: str, rows: list[int]) -> None:
    """Run on every rank: load, compare with one process, save."""
    namespace: dict[str, Any] = {}
    exec(code(), namespace)
    try:
        model = load(folder, tp_plan=namespace["plan"])
    finally:
        del tp_transformers.strategies.STRATEGIES["output_features"]
    layer = model.model.layers[0].mlp.gate_proj
    assert type(layer.tp_strategy).__name__ == "OutputFeatures"
    assert type(layer.weight).__name__ == "ShardDTensor"
    assert len(tp_transformers.local_tensor(layer.weight)) == rows[model.tp_group.rank]
    found = compare_seen(model, observe(model), torch.load(reference_file))
    assert found["logits"] < TOLERANCE
    assert found["tokens"]
    assert found["grads"][1] < TOLERANCE, found["grads"]
    assert excess_read(model, folder) == 0  # only the slice was read
    model.save_pretrained(saved, max_shard_size="60KB")


@pytest.mark.parametrize(("size", "rows"), [(2, [50, 50]), (3, [34, 34, 32])])
def test_the_strategy_of_the_page_works(pool, cases, tmp_path, size, rows) -> None:
    case = cases(8, 4)
    pool.run(size, with_the_strategy_of_the_page, case.folder, case.reference, str(tmp_path / "saved"), rows)
    assert_same_files(case.folder, str(tmp_path / "saved"))
