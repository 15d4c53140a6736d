"""Ranks, seen from one process, and the store at which they meet."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.pool import forget_meshes
from tp_transformers.errors import MeshError, RemoteRankError
from tp_transformers.ranks import direct, mesh
from tp_transformers.ranks import group as group_module
from tp_transformers.ranks.environment import host_of, node_name
from tp_transformers.ranks.group import TensorParallelGroup
from tp_transformers.ranks.mesh import exchange, find_store, ranks_of_copies


class Subclass(torch.Tensor):
    """A tensor that a transport does not know."""


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
def test_the_first_rank_of_every_node(nodes, first, monkeypatch) -> None:
    monkeypatch.setattr(OnNodes, "nodes", list(nodes))
    found = []
    for rank, node in enumerate(nodes):
        monkeypatch.setattr(group_module, "node_name", lambda node=node: node)
        group = OnNodes(None, rank, len(nodes), torch.device("cpu"))
        if group.first_on_node(lambda is_first: is_first):
            found.append(rank)
    assert found == first


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("a", "b", "a subject: got 'a' on rank 0 and 'b' on rank 1"),
        ("a" * 999, "a" * 998 + "b", "a subject: got one on rank 0 and another on rank 1"),
        ("a" * 999, "b" * 999, "a subject: got one on rank 0 and another on rank 1"),
        ("a" * 999, "a" * 999, ""),
    ],
)
def test_values_that_differ_are_shown(first, second, said, monkeypatch) -> None:
    votes = [(None, [{"same": 1, "a subject": value}]) for value in (first, second)]
    monkeypatch.setattr(TensorParallelGroup, "_gather", lambda *_: votes)
    group = TensorParallelGroup(None, 0, 2, torch.device("cpu"))
    with pytest.raises(MeshError, match=said) if said else nullcontext():
        group.check_same({})
    found = group_module.differing([vote[1][0] for vote in votes])
    assert found == ((1, ["a subject"]) if said else (0, []))


@pytest.mark.parametrize(
    ("other", "raised", "said"),
    [("own", ValueError, "^own$"), ("else", RemoteRankError, "^rank 0: ValueError: own$")],
)
def test_an_error_of_all_ranks_is_raised_as_it_is(other, raised, said, monkeypatch) -> None:
    votes = [(group_module.reported(ValueError(text)), []) for text in ("own", other)]
    monkeypatch.setattr(TensorParallelGroup, "_gather", lambda *_: votes)
    group = TensorParallelGroup(None, 0, 2, torch.device("cpu"))
    with pytest.raises(raised, match=said), group.agree():
        raise ValueError("own")


def test_a_node_has_the_name_of_its_host() -> None:
    assert host_of(node_name()) == socket.gethostname()
    assert node_name() == node_name()


@pytest.mark.parametrize(
    ("axes", "copies"),
    [
        ({"dp": 2, "tp": 3}, ((0, 1, 2), (3, 4, 5))),
        ({"tp": 3, "dp": 2}, ((0, 2, 4), (1, 3, 5))),
        ({"pp": 2, "dp": 2, "tp": 3}, ((0, 1, 2), (3, 4, 5))),
    ],
)
def test_copies_of_a_model_by_the_axes_of_a_mesh(axes, copies) -> None:
    dist.init_process_group("fake", rank=0, world_size=prod(axes.values()), store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        assert ranks_of_copies(mesh, "dp") == copies
    finally:
        dist.destroy_process_group()
        forget_meshes()


def test_one_rank_calls_no_backend() -> None:
    group, x = mock.Mock(size=mock.Mock(return_value=1)), torch.ones(3)
    direct.all_reduce(x, group)
    assert direct.all_gather(x, group) is direct.reduce_scatter(x, group) is x
    assert (x.tolist(), group.mock_calls) == ([1, 1, 1], [mock.call.size()] * 3)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_store_that_nobody_made(monkeypatch, host) -> None:
    monkeypatch.setattr(mesh, "LATE", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(MeshError, match=f"the ranks: got no store at {host}:{port} within 1 s"):
        find_store()


def test_ranks_that_do_not_come_are_named(monkeypatch) -> None:
    monkeypatch.setattr(mesh, "LATE", timedelta(seconds=0.1))
    store = dist.HashStore()
    store.set("seat 2", "0")
    with pytest.raises(MeshError, match="no sign of rank 1, 3 of 4 within 0 s"):
        exchange(store, "seat", 0, 0, 4)


def test_plain_tensors_of_the_cpu_take_the_transport(monkeypatch) -> None:
    group, transport, operators = SimpleNamespace(group_name="a group"), direct.Transport(), object()
    monkeypatch.setitem(direct._transports, id(group), transport)
    monkeypatch.setitem(direct.OPERATORS, "a group", operators)
    x = torch.ones(2)
    takes = [x, nn.Parameter(x), x.to(torch.complex64), x.as_subclass(Subclass), x.to("meta")]
    assert [direct.transport_for(group, each) is transport for each in takes] == [True, True, False, False, False]  # type: ignore[arg-type]
    assert [direct._operators(each, group) for each in (x, x.to("meta"))] == [operators, None]  # type: ignore[arg-type]
