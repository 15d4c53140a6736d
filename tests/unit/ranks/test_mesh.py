"""Ranks, seen from one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tp_transformers.ranks.mesh import TensorParallelGroup


@pytest.mark.parametrize(
    ("ranks", "ranks_a_node", "first"),
    [
        ([0], 1, [0]),
        ([0, 1, 2, 3], 4, [0]),
        ([0, 1, 2, 3], 2, [0, 2]),
        ([4, 5, 6, 7], 8, [4]),
        ([1, 3, 5, 7], 4, [1, 5]),
        ([1, 3, 5], 2, [1, 3, 5]),
    ],
)
def test_the_first_rank_of_every_node(
    ranks: list[int], ranks_a_node: int, first: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    mesh: Any = SimpleNamespace(mesh=torch.tensor(ranks))
    for number, rank in enumerate(ranks):
        monkeypatch.setenv("LOCAL_RANK", str(rank % ranks_a_node))
        if TensorParallelGroup(mesh, number, len(ranks), torch.device("cpu")).is_first_on_node:
            found.append(rank)
    assert found == first


def test_without_torchrun_all_ranks_are_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    mesh: Any = SimpleNamespace(mesh=torch.tensor([0, 1]))
    groups = [TensorParallelGroup(mesh, rank, 2, torch.device("cpu")) for rank in range(2)]
    assert [group.is_first_on_node for group in groups] == [True, False]
