"""Ranks, seen from one process, and the store at which they meet."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tp_transformers.errors import MeshError
from tp_transformers.ranks import direct, mesh
from tp_transformers.ranks import group as group_module
from tp_transformers.ranks.group import TensorParallelGroup
from tp_transformers.ranks.mesh import exchange, find_store


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


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_store_that_nobody_made(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(mesh, "LATE", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(MeshError, match=f"rank 1: got no store at {host}:{port}"):
        find_store()


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "LATE", timedelta(seconds=0.1))
    store = dist.HashStore()
    store.set("seat 2", "0")
    with pytest.raises(MeshError, match="no sign of rank 1, 3 of 4 within 0 s"):
        exchange(store, "seat", 0, 0, 4)
