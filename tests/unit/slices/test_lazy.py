"""Lazy slices against the same slices of real tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.slices.lazy import Deferred, LazyTensor, Resident

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    tensors = {str(dtype): torch.randint(0, 2, (5, 4, 6)).to(dtype) for dtype in DTYPES}
    tensors.update(scalar=torch.tensor(3.5), empty=torch.empty(0, 3), row=torch.arange(11.0))
    path = tmp_path_factory.mktemp("lazy") / "model.safetensors"
    save_file(tensors, path)
    with Checkpoint([path]) as opened:
        yield opened, tensors


@st.composite
def ranges(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    pairs = draw(st.lists(st.tuples(st.integers(0, length), st.integers(0, length)), min_size=1, max_size=3))
    return [(min(pair), max(pair)) for pair in pairs]


def select(tensor: torch.Tensor, dim: int, chosen: list[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in chosen], dim)


@given(st.data())
def test_any_chain_of_selections_reads_what_torch_slices(checkpoint, data) -> None:
    opened, tensors = checkpoint
    name = data.draw(st.sampled_from([str(dtype) for dtype in DTYPES]))
    expected = tensors[name]
    lazies: list[LazyTensor] = [
        opened.tensors[name],
        Resident(expected),
        Deferred(lambda: tensors[name], shape=expected.shape, dtype=expected.dtype),
    ]
    for _ in range(data.draw(st.integers(0, 3))):
        dim = data.draw(st.integers(0, 2))
        chosen = data.draw(ranges(expected.shape[dim]))
        lazies = [lazy.select(dim, chosen) for lazy in lazies]
        expected = select(expected, dim, chosen)
    for lazy in lazies:
        assert lazy.shape == expected.shape
        value = lazy.materialize()
        assert value.is_contiguous()
        assert torch.equal(value, expected)
    assert sum(length for _, length in lazies[0].byte_ranges()) == expected.numel() * expected.dtype.itemsize


def test_a_leading_slice_is_one_run_and_a_trailing_one_a_run_a_row(checkpoint) -> None:
    lazy = checkpoint[0].tensors[str(torch.float32)]
    assert len(list(lazy.byte_ranges())) == 1
    assert len(list(lazy.select(0, [(1, 3)]).byte_ranges())) == 1
    assert len(list(lazy.select(1, [(1, 3)]).byte_ranges())) == 5
    assert len(list(lazy.select(2, [(1, 3)]).byte_ranges())) == 5 * 4
    assert len(list(lazy.select(0, [(2, 3)]).select(1, [(1, 3)]).byte_ranges())) == 1


def test_a_leaf_is_its_own_only_piece(checkpoint) -> None:
    opened, tensors = checkpoint
    for lazy in (opened.tensors["row"].select(0, [(2, 5)]), Resident(tensors["row"][2:5])):
        destination = torch.empty(3)
        ((step, view),) = lazy.read_steps(destination)
        assert step is lazy
        assert view is destination


def test_slicing_reads_nothing(checkpoint) -> None:
    opened, _ = checkpoint
    before = opened.bytes_read
    half = opened.tensors[str(torch.float32)].select(0, [(2, 5)]).select(2, [(1, 4)])
    assert isinstance(half, LazyTensor)
    assert opened.bytes_read == before
    half.materialize()
    assert opened.bytes_read - before == 3 * 4 * 3 * 4


def test_scalars_and_empty_tensors(checkpoint) -> None:
    opened, tensors = checkpoint
    for name in ("scalar", "empty"):
        assert torch.equal(opened.tensors[name].materialize(), tensors[name])
