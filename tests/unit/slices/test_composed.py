"""Stacks, concatenations, transposes and their slices against the same done by torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.unit.slices.test_lazy import ranges, select
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.checkpoint.reading.jobs import Request
from tp_transformers.checkpoint.reading.reader import read
from tp_transformers.slices.composed import Concat, Squeeze, Stack, Transpose, concat, permute, reshaped
from tp_transformers.slices.lazy import Deferred, LazyTensor, Resident
from tp_transformers.slices.stored import Stored

Pair = tuple[LazyTensor, torch.Tensor]

SHAPE = (3, 4, 5)


@pytest.fixture(scope="module")
def leaves(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(0)
    tensors = {str(index): torch.randn(SHAPE) for index in range(4)}
    path = tmp_path_factory.mktemp("expressions") / "model.safetensors"
    save_file(tensors, path)
    with Checkpoint([path]) as opened:
        stored: list[Pair] = [(opened.tensors[name], tensor) for name, tensor in tensors.items()]
        memory = torch.randn(SHAPE)
        resident: Pair = (Resident(memory), memory)
        deferred: Pair = (Deferred(lambda: memory, shape=SHAPE, dtype=memory.dtype), memory)
        yield opened, [*stored, resident, deferred]


@st.composite
def expressions(draw: st.DrawFn, leaves: list[Pair]) -> Pair:
    """A random tree of expressions with random selections between them, and what torch makes of the same."""
    lazy, real = draw(st.sampled_from(leaves))
    for _ in range(draw(st.integers(1, 4))):
        dim = draw(st.integers(0, real.ndim - 1))
        # Tensors of one shape: other leaves under the same steps are hard to draw, so vary by permuting.
        order = draw(st.permutations(range(real.shape[dim])))
        other = (permute(lazy, dim, order), real.index_select(dim, torch.tensor(order, dtype=torch.long)))
        step = draw(st.sampled_from(["stack", "concat", "transpose", "squeeze", "permute", "select"]))
        if step == "stack" and real.ndim < 5:
            at = draw(st.integers(0, real.ndim))
            lazy, real = Stack([lazy, other[0], lazy], at), torch.stack([real, other[1], real], at)
        elif step == "concat":
            chosen = draw(ranges(real.shape[dim]))
            part = (other[0].select(dim, chosen), select(other[1], dim, chosen))
            lazy, real = Concat([lazy, part[0]], dim), torch.cat([real, part[1]], dim)
        elif step == "transpose":
            with_dim = draw(st.integers(0, real.ndim - 1))
            lazy, real = Transpose(lazy, dim, with_dim), real.transpose(dim, with_dim)
        elif step == "squeeze" and real.shape[dim] and real.ndim > 1:
            index = draw(st.integers(0, real.shape[dim] - 1))
            lazy, real = Squeeze(lazy.select(dim, [(index, index + 1)]), dim), real.select(dim, index)
        elif step == "permute":
            lazy, real = other
        else:
            chosen = draw(ranges(real.shape[dim]))
            lazy, real = lazy.select(dim, chosen), select(real, dim, chosen)
    return lazy, real


@given(st.data())
def test_any_tree_reads_what_torch_computes(leaves, data) -> None:
    opened, pairs = leaves
    lazy, expected = data.draw(expressions(pairs))
    assert lazy.shape == expected.shape
    assert lazy.dtype == expected.dtype
    value = lazy.materialize()
    assert value.is_contiguous()
    assert torch.equal(value, expected)
    # As the loader does: leaves of files by the reader, the others one by one; every element once.
    destination = torch.full(expected.shape, torch.nan)
    steps = list(lazy.read_steps(destination))
    assert sum(step.numel() for step, _ in steps) == expected.numel()
    before = opened.bytes_read
    read([Request(step, view) for step, view in steps if isinstance(step, Stored)])
    assert opened.bytes_read - before == sum(step.nbytes for step, _ in steps if isinstance(step, Stored))
    for step, view in steps:
        if not isinstance(step, Stored):
            view.copy_(step.materialize())
    assert torch.equal(destination, expected)


def test_experts_are_read_straight_into_place(leaves) -> None:
    """In the usual layout no piece needs the staging buffer, however it is sliced."""
    narrow = [lazy.select(0, [(0, 1)]) for lazy, _ in leaves[1][:4]]
    gates, ups = ([Squeeze(tensor, 0) for tensor in pair] for pair in (narrow[:2], narrow[2:]))
    merged = Concat([Stack(gates, 0), Stack(ups, 0)], 1)  # (2, 4 + 4, 5)
    for shard in (merged, merged.select(1, [(1, 3), (5, 7)]), merged.select(2, [(1, 4)]), merged.select(0, [(1, 2)])):
        steps = list(shard.read_steps(torch.empty(shard.shape)))
        assert len(steps) == 2 * shard.shape[0]
        for step, view in steps:
            assert isinstance(step, Stored)
            assert view.is_contiguous()


def test_neighbours_of_one_stored_tensor_become_one(leaves) -> None:
    (first, real), (other, _) = leaves[1][:2]
    rows = [first.select(0, [(index, index + 1)]) for index in range(3)]
    whole = Concat([rows[0], other, rows[1], rows[2]], 0)
    merged = whole.select(0, [(0, 1), (4, 6)])
    assert isinstance(merged, Stored)
    assert merged.selection == first.selection
    swapped = concat([rows[1], rows[0], other], 0)
    assert [type(tensor) for tensor in swapped.tensors] == [Stored, Stored]
    assert torch.equal(swapped.tensors[0].materialize(), real[[1, 0]])
    # Of different tensors, or of other selections of another dim, they stay apart.
    assert len(concat([rows[0], other.select(0, [(1, 2)])], 0).tensors) == 2
    narrow = [first.select(1, [(1, 3)]).select(0, [(0, 1)]), first.select(1, [(2, 4)]).select(0, [(1, 2)])]
    assert len(concat(narrow, 0).tensors) == 2


def test_no_indices_are_permuted_and_joined(leaves) -> None:
    assert permute(Resident(torch.ones(0, 3)), 0, []).shape == (0, 3)
    assert concat([leaves[1][0][0].select(0, [(place, place)]) for place in (0, 1)], 0).shape == (0, *SHAPE[1:])


def test_only_a_full_stored_tensor_is_reshaped_without_a_read(leaves) -> None:
    opened, ((stored, real), *_, (resident, memory), _) = leaves
    before = opened.bytes_read
    flat = reshaped(stored, (12, 5))
    assert isinstance(flat, Stored)
    assert reshaped(stored, SHAPE) is stored
    assert opened.bytes_read == before
    backwards = permute(stored, 0, [2, 1, 0]), real.flip(0)
    for lazy, expected in ((flat, real), backwards, (resident, memory), (stored.select(0, [(1, 3)]), real[1:3])):
        assert torch.equal(reshaped(lazy, (expected.numel(),)).materialize(), expected.flatten())


def test_slicing_reads_nothing(leaves) -> None:
    opened, pairs = leaves
    before = opened.bytes_read
    whole = Transpose(Stack([lazy for lazy, _ in pairs[:4]], 0), 1, 3)  # (4, 5, 4, 3)
    half = whole.select(0, [(1, 3)]).select(3, [(0, 2)])
    assert isinstance(half, LazyTensor)
    assert opened.bytes_read == before
    expected = torch.stack([real for _, real in pairs[:4]]).transpose(1, 3)[1:3, ..., :2]
    assert torch.equal(half.materialize(), expected)
    assert opened.bytes_read - before == half.nbytes == expected.numel() * 4


def test_parts_must_fit(leaves) -> None:
    ((lazy, _), *_) = leaves[1]
    other = Resident(torch.zeros(SHAPE, dtype=torch.float64))
    for make in (
        lambda: Stack([], 0),
        lambda: Concat([], 0),
        lambda: Stack([lazy, lazy.select(0, [(0, 2)])], 0),
        lambda: Stack([lazy, other], 0),
        lambda: Concat([lazy, lazy.select(0, [(0, 2)])], 1),
        lambda: Concat([lazy, other], 1),
        lambda: Squeeze(lazy, 0),
    ):
        with pytest.raises(ValueError, match=r"tensors|Squeeze"):
            make()
