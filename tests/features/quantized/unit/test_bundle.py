"""Bundles, by any selection, against the same selection of what they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.unit.slices.test_lazy import ranges, select
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.checkpoint.reading.jobs import Request
from tp_transformers.checkpoint.reading.reader import read
from tp_transformers.features.quantized.bundle import Bundle, Component, DimMap, Dims, StoredValues
from tp_transformers.slices.composed import Stack, Transpose
from tp_transformers.slices.lazy import LazyTensor, Resident
from tp_transformers.slices.stored import Stored

SHAPE = (3, 21, 34)  # no multiples of the units
DIMS: dict[str, Dims] = {
    "pairs": (DimMap(0), DimMap(1), DimMap(2, 2)),
    "groups": (DimMap(0), DimMap(1), DimMap(2, 12)),
    "rows": (DimMap(1, 4), DimMap(0)),
    "words": (DimMap(2, 8, 2),),
    "all": (1,),
}


def decode(stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    """The sum of what there is for an element, at its place in its unit."""
    *_, rows, columns = shape
    pairs = torch.stack((stored["pairs"] // 100, stored["pairs"] % 100), -1).flatten(-2)[..., :columns]
    groups = stored["groups"].repeat_interleave(12, -1)[..., :columns]
    of_rows = stored["rows"].repeat_interleave(4, 0)[:rows].t().unsqueeze(-1)
    return (pairs + groups + of_rows + stored["words"].repeat_interleave(4)[:columns] + stored["all"]).float()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory):
    """A bundle of integers in a file, and what it stands for."""
    torch.manual_seed(0)
    sizes = {"pairs": (3, 21, 17), "groups": (3, 21, 3), "rows": (6, 3), "words": (9,), "all": (1,)}
    made = {name: torch.randint(0, 10000, size, dtype=torch.int32) for name, size in sizes.items()}
    path = tmp_path_factory.mktemp("bundle") / "model.safetensors"
    save_file(made, path)
    e, i, j = torch.meshgrid(*map(torch.arange, SHAPE), indexing="ij")
    pairs = made["pairs"][e, i, j // 2]
    expected = torch.where(j % 2 == 0, pairs // 100, pairs % 100) + made["groups"][e, i, j // 12]
    expected = expected + made["rows"][i // 4, e] + made["words"][j // 4] + made["all"]
    with Checkpoint([path]) as opened:
        components = {name: Component(opened.tensors[name], dims) for name, dims in DIMS.items()}
        yield opened, Bundle(components, SHAPE, torch.float32, decode), expected.float()


def filled(lazy: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
    """As the loader does: leaves of files by the reader, then the others."""
    destination = torch.full(lazy.shape, torch.nan, dtype=dtype)
    steps = list(lazy.read_steps(destination))
    read([Request(step, view) for step, view in steps if isinstance(step, Stored)])
    for step, view in steps:
        if not isinstance(step, Stored):
            step.fill(view)
    return destination


@given(st.data())
def test_a_selection_reads_its_own_units_of_every_component(bundle, data) -> None:
    opened, lazy, real = bundle
    index = [torch.arange(length) for length in SHAPE]
    for _ in range(data.draw(st.integers(0, 3))):
        dim = data.draw(st.integers(0, 2))
        chosen = data.draw(ranges(real.shape[dim]))
        lazy, real, index[dim] = lazy.select(dim, chosen), select(real, dim, chosen), select(index[dim], 0, chosen)
    before = opened.bytes_read
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    assert torch.equal(filled(lazy, dtype), real.to(dtype))
    experts, rows, columns = (set(each.tolist()) for each in index)
    halves, groups = {c // 2 for c in columns}, {c // 12 for c in columns}
    words = sum(min(2, 9 - 2 * unit) for unit in {c // 8 for c in columns})
    count = len(experts) * (len(rows) * (len(halves) + len(groups)) + len({row // 4 for row in rows})) + words + 1
    if real.numel():
        assert opened.bytes_read - before == 4 * count
    assert torch.equal(lazy.materialize(), real)


def test_under_other_expressions(bundle) -> None:
    _, whole, real = bundle
    lazy: LazyTensor = Stack([whole.select(0, [(1, 3)]), whole.select(0, [(0, 2)])], 0)
    lazy = Transpose(lazy, 2, 3).select(2, [(5, 30)])
    assert torch.equal(
        filled(lazy, torch.bfloat16),
        torch.stack([real[1:3], real[0:2]]).transpose(2, 3)[:, :, 5:30].to(torch.bfloat16),
    )


def test_members_must_fit() -> None:
    components = {"scales": Component(Resident(torch.ones(4, 3)), (DimMap(0), DimMap(1, 8)))}
    with pytest.raises(ValueError, match=r"scales of shape \(4, 3\), not \(4, 4\)"):
        Bundle(components, (4, 30), torch.float32, decode)
