"""Collectives in a forward, and their backward."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.comparisons import relative
from tests.support.tiers import wide
from tp_transformers.ranks import collectives, direct
from tp_transformers.ranks.collectives import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region
from tp_transformers.ranks.group import FIRST_BYTES
from tp_transformers.ranks.mesh import join

pytestmark = pytest.mark.distributed


def run_collectives() -> list[float]:
    group = join()
    rank, size, process_group = group.rank, group.size, group.process_group
    widths = tuple(range(1, size + 1))
    results = []

    # f: identity forward, sum backward.
    x = torch.full((2, 3), float(rank + 1), requires_grad=True)
    y = copy_to_region(x, process_group)
    (y * (rank + 1)).sum().backward()
    results += [relative(y, x.detach()), relative(x.grad, torch.full((2, 3), float(sum(widths))))]
    # g: sum forward, identity backward; the input is left as it was.
    x = torch.full((2, 3), float(rank + 1), requires_grad=True)
    y = reduce_from_region(x, process_group)
    (y * 5).sum().backward()
    results += [relative(y, torch.full((2, 3), float(sum(widths)))), relative(x.grad, torch.full((2, 3), 5.0))]
    results.append(float((x != rank + 1).any()))
    # In place, what needs no gradient is the sum itself.
    for records in (False, True):
        x = torch.full((2, 3), float(rank + 1))
        with torch.set_grad_enabled(records):
            y = reduce_from_region(x, process_group, in_place=True)
        results += [relative(y, torch.full((2, 3), float(sum(widths)))), float(y is not x or y.requires_grad)]
    # The base of a view is left as it was, too.
    base = torch.full((2, 3), float(rank + 1), requires_grad=True) * 1
    y = reduce_from_region(base.view(3, 2), process_group, in_place=True)
    y.sum().backward()
    results += [relative(y, torch.full((3, 2), float(sum(widths)))), float((base != rank + 1).any())]
    # Gather and scatter are each other's backward, along any dim.
    for dim in (0, 1, -1):
        whole = torch.arange(2.0 * 3 * sum(widths)).reshape(2, 3, sum(widths)).movedim(-1, dim)
        start = sum(widths[:rank])
        part = whole.narrow(dim, start, widths[rank])
        x = part.clone().requires_grad_()
        y = gather_from_region(x, widths, process_group, dim=dim)
        (y * whole).sum().backward()
        results += [relative(y, whole), relative(x.grad, part)]
        x = whole.clone().requires_grad_()
        y = scatter_to_region(x, widths, process_group, dim=dim)
        (y * part).sum().backward()
        results += [relative(y, part), relative(x.grad, whole)]
    return results


@pytest.mark.parametrize("size", wide([3, 2], 1))
def test_collectives_and_their_backward(pool: Any, size: int) -> None:
    for results in pool.run(size, run_collectives):
        assert max(results) == 0


def by_backend() -> list[float]:
    """Run on every rank: collectives of a group without a transport."""
    group = join()
    rank, size, process_group = group.rank, group.size, group.process_group
    ranks, rows = torch.arange(float(size))[:, None], torch.arange(2.0 * size)[:, None].expand(-1, 3)
    with mock.patch.object(direct, "transport_of", return_value=direct.BACKEND):
        total, largest, sent = ranks[rank] + torch.ones(3), ranks[rank] + torch.ones(3), torch.full((3,), float(rank))
        direct.all_reduce(total, process_group)
        direct.all_reduce(largest, process_group, direct.MAX)
        direct.broadcast(sent, process_group, size - 1)
        return [
            relative(total, torch.full((3,), float(size + sum(range(size))))),
            relative(largest, torch.full((3,), float(size))),
            relative(sent, torch.full((3,), float(size - 1))),
            relative(direct.all_gather(ranks[rank : rank + 1], process_group), ranks),
            relative(
                direct.reduce_scatter(rows * (rank + 1), process_group),
                rows.view(size, 2, 3)[rank] * sum(range(size + 1)),
            ),
            relative(direct.all_to_all(ranks + rank, [1] * size, [1] * size, process_group), ranks + rank),
            float(group.gather(rank) != [*range(size)]),
        ]


def compiled() -> list[float]:
    """Run on every rank: graphs of a group without custom operators."""
    group = join()
    process_group, ranks = group.process_group, torch.arange(float(group.size))[:, None]

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + 1
        direct.all_reduce(total, process_group)
        return total, direct.all_gather(x, process_group)

    with mock.patch.dict(direct.OPERATORS, clear=True):
        total, gathered = torch.compile(both, backend="eager", fullgraph=True)(ranks[group.rank :][:1])
    return [relative(gathered, ranks), relative(total, (ranks + 1).sum(0, keepdim=True))]


def test_graphs_without_operators(pool: Any) -> None:
    for results in pool.run(2, compiled):
        assert max(results) == 0


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_without_a_transport(pool: Any, size: int) -> None:
    for results in pool.run(size, by_backend):
        assert max(results) == 0


def gather_lengths() -> bool:
    """Run on every rank: gathered values whose lengths differ by rank."""
    group, found = join(), []
    for base in (0, 350, FIRST_BYTES, 5000):
        values = [bytes([rank]) * (base + 97 * rank) for rank in range(group.size)]
        expected: list[Any] = [None] * group.size
        dist.all_gather_object(expected, values[group.rank])
        found.append(group.gather(values[group.rank]) == expected)
    return all(found)


def test_values_of_any_length_are_gathered(pool: Any) -> None:
    assert pool.run(3, gather_lengths) == [True] * 3


def test_padding_makes_no_zeros_in_a_graph() -> None:
    """Inductor would take them for zeros of the model, and compute those that read them by other kernels."""
    graph = make_fx(lambda x: collectives._padded(x, 5, 0))(torch.ones(3, 2)).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert targets
    assert not any(name in target for target in targets for name in ("zeros", "full", "pad"))
