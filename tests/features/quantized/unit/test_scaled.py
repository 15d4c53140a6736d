"""Values times the scales of their blocks, by any selection, against the same done by torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.unit.slices.test_lazy import ranges, select
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.checkpoint.reading.jobs import Request
from tp_transformers.checkpoint.reading.memory import copy, from_float8, has_nan, shifted_float8
from tp_transformers.checkpoint.reading.reader import read
from tp_transformers.features.quantized.scaled import Scaled
from tp_transformers.slices.composed import Stack, Transpose
from tp_transformers.slices.lazy import LazyTensor, Resident
from tp_transformers.slices.stored import Stored

SHAPE, BLOCK = (3, 21, 34), (1, 8, 16)  # no multiples of the blocks
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(0)
    values = (torch.randn(SHAPE) * 90).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, 3) * 0.01
    path = tmp_path_factory.mktemp("scaled") / "model.safetensors"
    save_file({"values": values, "scales": scales}, path)
    spread = scales.repeat_interleave(8, 1).repeat_interleave(16, 2)[:, :21, :34]
    with Checkpoint([path]) as opened:
        yield opened, values.float() * spread


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
def test_a_selection_reads_its_values_and_the_scales_of_its_blocks(stored, data: st.DataObject) -> None:
    opened, real = stored
    lazy: LazyTensor = Scaled(opened.tensors["values"], opened.tensors["scales"], BLOCK)
    positions = torch.arange(real.numel()).view(SHAPE)
    for _ in range(data.draw(st.integers(0, 3))):
        dim = data.draw(st.integers(0, 2))
        chosen = data.draw(ranges(real.shape[dim]))
        lazy, real, positions = (
            lazy.select(dim, chosen),
            select(real, dim, chosen),
            select(positions, dim, chosen),
        )
    dtype = data.draw(st.sampled_from(DTYPES))
    before = opened.bytes_read
    assert torch.equal(filled(lazy, dtype), real.to(dtype))
    # The blocks of a selection are those of its rows times those of its columns.
    used = [{int(at) // size for at in index.unique()} for index, size in zip(_indices(positions), BLOCK, strict=True)]
    scales = len(used[0]) * len(used[1]) * len(used[2]) if real.numel() else None
    if scales is not None:
        assert opened.bytes_read - before == real.numel() + 4 * scales
    assert torch.equal(lazy.materialize(), real)


def _indices(positions: torch.Tensor) -> list[torch.Tensor]:
    """The index in each dim of the whole of what stands at `positions`."""
    return [positions // (SHAPE[1] * SHAPE[2]), positions // SHAPE[2] % SHAPE[1], positions % SHAPE[2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_under_other_expressions(stored, dtype: torch.dtype) -> None:
    """Experts that are stacked and transposed, as converters do: the product goes where the values went."""
    opened, real = stored
    whole = Scaled(opened.tensors["values"], opened.tensors["scales"], BLOCK)
    lazy = Transpose(Stack([whole.select(0, [(1, 3)]), whole.select(0, [(0, 2)])], 0), 2, 3).select(2, [(5, 30)])
    expected = torch.stack([real[1:3], real[0:2]]).transpose(2, 3)[:, :, 5:30]
    assert torch.equal(filled(lazy, dtype), expected.to(dtype))


def test_scales_must_fit() -> None:
    values = Resident(torch.zeros(21, 34, dtype=torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"\(2, 3\).*8 x 16, which are 3 x 3"):
        Scaled(values, Resident(torch.ones(2, 3)), (8, 16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nan", [True, False])
def test_every_float8_is_cast_as_torch_does(dtype: torch.dtype, nan: bool, tmp_path: Path) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(3000).view(-1, 64)
    if not nan:
        every = torch.where(every.float().isnan(), 0, every.float()).to(torch.float8_e4m3fn)
    for destination in (torch.empty(every.shape, dtype=dtype), torch.empty(every.shape[::-1], dtype=dtype).t()):
        copy(every, destination)
        assert torch.equal(destination.nan_to_num(7), every.to(dtype).nan_to_num(7))
        copy(every[:, 3:21], destination[:, :18])
        assert torch.equal(destination[:, :18].nan_to_num(7), every[:, 3:21].to(dtype).nan_to_num(7))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("without", [set(), {0x7F}, {0xFF}, {0x7F, 0xFF}])  # the NaN of float8_e4m3fn
def test_every_float8_has_the_bits_of_torch(kind: torch.dtype, without: set[int]) -> None:
    every = torch.tensor([byte for byte in range(256) if byte not in without], dtype=torch.uint8).view(kind)
    expected = every.float()
    values = from_float8(every)
    assert values.dtype == torch.float32
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(7).view(torch.int32), expected.nan_to_num(7).view(torch.int32))
    if kind == torch.float8_e4m3fn:
        assert has_nan(every) == bool(expected.isnan().any())
        if len(without) == 2:
            for values in (shifted_float8(every), shifted_float8(every, torch.empty(2 * len(every)))):
                assert torch.equal(values * 256, expected)
