"""Ranks, seen from one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from tp_transformers.ranks import direct
from tp_transformers.ranks import group as group_module
from tp_transformers.ranks.group import TensorParallelGroup


@dataclass(frozen=True)
class OnNodes(TensorParallelGroup):
    """One rank of several, without the others, each on a node of a name."""

    nodes: ClassVar[list[str]] = []

    def everywhere(self, function: Any) -> list[Any]:
        """The names of all ranks' nodes, of which this rank knows its own."""
        assert function() == self.nodes[self.rank]
        return self.nodes

    def together(self, function: Any) -> Any:
        """Run by this rank alone."""
        return function()


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", [0]), ("aaaa", [0]), ("aabb", [0, 2]), ("abab", [0, 1]), ("bbaac", [0, 2, 4])]
)
def test_the_first_rank_of_every_node(nodes: str, first: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnNodes, "nodes", list(nodes))
    found = []
    for rank, node in enumerate(nodes):
        monkeypatch.setattr(group_module, "node_name", lambda node=node: node)
        group = OnNodes(None, rank, len(nodes), torch.device("cpu"))
        if group.first_on_node(lambda is_first: is_first):
            found.append(rank)
    assert found == first


def test_one_rank_calls_no_backend() -> None:
    group, x = mock.Mock(size=mock.Mock(return_value=1)), torch.ones(3)
    direct.all_reduce(x, group)
    assert direct.all_gather(x, group) is direct.reduce_scatter(x, group) is x
    assert (x.tolist(), group.mock_calls) == ([1, 1, 1], [mock.call.size()] * 3)
