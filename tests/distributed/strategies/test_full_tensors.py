"""Shards to whole tensors: the values, and what is in memory meanwhile."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.groups import join
from tests.support.memory import Memory
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.slices.layout import Layout, Ranks, Split, chunked, packed
from tp_transformers.strategies import ParamShard, take
from tp_transformers.strategies.shards import gather

CHUNK = 4 << 10
SHAPE = (6, 50, 96)


def layouts(size: int) -> dict[str, Layout | None]:
    swapped = Split(50, tuple(reversed(Ranks(size).split(50).ranges)))
    return {
        "rows": Layout(0, Ranks(size).split(6)),
        "columns": Layout(2, chunked(96, size)),
        "halves": Layout(1, packed([Ranks(size).split(25)] * 2)),
        "held twice": Layout(1, Split(50, (*Ranks(size - 1).split(50).ranges, Ranks(size - 1).split(50).ranges[0]))),
        "the other way": Layout(1, swapped),
        "on one rank": Layout(1, Split(50, (*[((0, 0),)] * (size - 1), ((0, 50),)))),
        "whole": None,
    }


def values_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape).to(dtype)


@pytest.mark.parametrize("size", wide([3, 2], 1))
@on_ranks()
def test_a_rank_holds_what_it_asked_for_and_a_few_boxes() -> None:
    check_memory(1, ParamShard)


def check_memory(copies: int, kind: type[ParamShard]) -> None:
    """Both ways to the whole tensor, for every layout, over the last ranks of a mesh; the first ones are FSDP's."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("dp", "tp"))
    group, data_parallel = join(mesh), mesh["dp"].get_group() if copies > 1 else None
    has_any = False
    with mock.patch.object(gather, "CHUNK_BYTES", CHUNK):
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool):
            value = values_of(SHAPE, dtype)
            for name, layout in layouts(group.size).items():
                shard = kind(value.shape, layout, group, resharded_over=data_parallel)
                local: Any = take(value, layout, group.rank)
                local = local[shard.rows[0] : shard.rows[1]].clone()
                with Memory() as gathering:
                    gathered = shard.gather(local)
                with Memory() as filling:
                    full = shard.full(local)
                assert torch.equal(full.view(torch.uint8), value.view(torch.uint8)), name
                if gathered is not None:
                    assert torch.equal(gathered.view(torch.uint8), value.view(torch.uint8)), name
                held = 0 if data_parallel is None or layout is None else value.nbytes
                joined = take(value, layout, group.rank).nbytes if held and not dist.get_rank(data_parallel) else 0
                has_any |= gathered is not None
                assert gathering.peak - value.nbytes * (gathered is not None) - joined <= 3 * CHUNK, (name, dtype)
                # Five, and the one that gloo's thread may still hold after the wait for it.
                assert filling.peak - value.nbytes - held <= 6 * CHUNK, (name, dtype)
    assert has_any == (dist.get_rank() == 0)
    scalar = kind(torch.Size([]), None, group, resharded_over=data_parallel).gather(torch.tensor(1.0))
    assert (scalar is None) == bool(dist.get_rank())
