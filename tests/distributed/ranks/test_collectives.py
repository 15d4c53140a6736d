"""Collectives in a forward, and their backward."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.ranks import collectives, direct
from tp_transformers.ranks.collectives import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region
from tp_transformers.ranks.group import FIRST_BYTES
from tp_transformers.ranks.mesh import join


@pytest.mark.parametrize("size", wide([3, 2], 1))
@on_ranks()
def test_collectives_and_their_backward() -> None:
    group = join()
    rank, size, process_group = group.rank, group.size, group.process_group
    widths = tuple(range(1, size + 1))
    own, total = torch.full((2, 3), float(rank + 1)), torch.full((2, 3), float(sum(widths)))

    # f: identity forward, sum backward.
    x = own.clone().requires_grad_()
    y = copy_to_region(x, process_group)
    (y * (rank + 1)).sum().backward()
    assert torch.equal(y, own)
    assert torch.equal(x.grad, total)
    # g: sum forward, identity backward; the input is left as it was.
    x = own.clone().requires_grad_()
    y = reduce_from_region(x, process_group)
    (y * 5).sum().backward()
    assert torch.equal(y, total)
    assert torch.equal(x.grad, torch.full((2, 3), 5.0))
    assert torch.equal(x, own)
    # In place, what needs no gradient is the sum itself.
    for records in (False, True):
        x = own.clone()
        with torch.set_grad_enabled(records):
            y = reduce_from_region(x, process_group, in_place=True)
        assert torch.equal(y, total)
        assert y is x
        assert not y.requires_grad
    # The base of a view is left as it was, too.
    base = own.clone().requires_grad_() * 1
    y = reduce_from_region(base.view(3, 2), process_group, in_place=True)
    y.sum().backward()
    assert torch.equal(y, total.view(3, 2))
    assert torch.equal(base, own)
    # Gather and scatter are each other's backward, along any dim.
    for dim in (0, 1, -1):
        whole = torch.arange(2.0 * 3 * sum(widths)).reshape(2, 3, sum(widths)).movedim(-1, dim)
        part = whole.narrow(dim, sum(widths[:rank]), widths[rank])
        for move, before, after in ((gather_from_region, part, whole), (scatter_to_region, whole, part)):
            x = before.clone().requires_grad_()
            y = move(x, widths, process_group, dim=dim)
            (y * after).sum().backward()
            assert torch.equal(y, after)
            assert torch.equal(x.grad, before)


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_collectives_without_a_transport() -> None:
    group = join()
    rank, size, process_group = group.rank, group.size, group.process_group
    ranks, rows = torch.arange(float(size))[:, None], torch.arange(2.0 * size)[:, None].expand(-1, 3)
    with mock.patch.object(direct, "transport_of", return_value=direct.BACKEND):
        total, largest, sent = ranks[rank] + torch.ones(3), ranks[rank] + torch.ones(3), torch.full((3,), float(rank))
        direct.all_reduce(total, process_group)
        direct.all_reduce(largest, process_group, direct.MAX)
        direct.broadcast(sent, process_group, size - 1)
        for found, expected in (
            (total, torch.full((3,), float(size + sum(range(size))))),
            (largest, torch.full((3,), float(size))),
            (sent, torch.full((3,), float(size - 1))),
            (direct.all_gather(ranks[rank : rank + 1], process_group), ranks),
            (
                direct.reduce_scatter(rows * (rank + 1), process_group),
                rows.view(size, 2, 3)[rank] * sum(range(size + 1)),
            ),
            (direct.all_to_all(ranks + rank, [1] * size, [1] * size, process_group), ranks + rank),
        ):
            assert torch.equal(found, expected)
        assert group.gather(rank) == [*range(size)]


@on_ranks(2)
def test_graphs_without_operators() -> None:
    group = join()
    process_group, ranks = group.process_group, torch.arange(float(group.size))[:, None]

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + 1
        direct.all_reduce(total, process_group)
        return total, direct.all_gather(x, process_group)

    with mock.patch.dict(direct.OPERATORS, clear=True):
        total, gathered = torch.compile(both, backend="eager", fullgraph=True)(ranks[group.rank :][:1])
    assert torch.equal(gathered, ranks)
    assert torch.equal(total, (ranks + 1).sum(0, keepdim=True))


@on_ranks(3)
def test_values_of_any_length_are_gathered() -> None:
    group = join()
    for base in (0, 350, FIRST_BYTES, 5000):
        values = [bytes([rank]) * (base + 97 * rank) for rank in range(group.size)]
        expected: list[Any] = [None] * group.size
        dist.all_gather_object(expected, values[group.rank])
        assert group.gather(values[group.rank]) == expected


def test_padding_makes_no_zeros_in_a_graph() -> None:
    """Inductor would take them for zeros of the model, and compute those that read them by other kernels."""
    graph = make_fx(lambda x: collectives._padded(x, 5, 0))(torch.ones(3, 2)).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert targets
    assert not any(name in target for target in targets for name in ("zeros", "full", "pad"))
