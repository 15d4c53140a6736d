"""Gather the full tensor from its shards, on every rank or on rank 0 alone, through buffers of bounded size.

Shards are split into blocks of at most CHUNK_BYTES, which are sent one after the other and copied into the full tensor.
So a rank holds the full tensor, if it asked for it, and a few blocks. Blocks are sent as bytes, on the device of the
process group; the tensor may be on another one: FSDP2 may have offloaded it to the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ...ranks.collectives import Group, all_gather_uneven
from ...ranks.group import TensorParallelGroup
from ...slices.layout import Layout, Range, chunked

CHUNK_BYTES = 16 << 20
"""Bytes that one rank receives at a time."""

Index = tuple[slice, ...]
Box = tuple[Index, Index]
"""The same block as an index of the full tensor, and as an index of a rank's shard."""


def on_all(local: Tensor, shape: Sequence[int], layout: Layout, group: Group, device: torch.device) -> Tensor:
    """Gather the full tensor of `shape` on every rank of `group` from `local` shards (all-gathers on `device`)."""
    whole = local.new_empty(tuple(shape))
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = [list(boxes(shape, layout, each, limit=CHUNK_BYTES // size // local.itemsize)) for each in range(size)]
    for turn in range(max(map(len, parts))):
        now = {each: part[turn] for each, part in enumerate(parts) if turn < len(part)}
        length = max(_count(place) for place, _ in now.values())
        sent = torch.empty(length, dtype=local.dtype, device=device)
        if rank in now:
            place, part = now[rank]
            sent[: _count(place)].view(_lengths(place)).copy_(local[part])
        got = all_gather_uneven(sent.view(torch.uint8), [sent.nbytes] * size, group, dim=0).view(local.dtype)
        for each, (place, _) in now.items():
            start = each * length
            whole[place].copy_(got[start : start + _count(place)].view(_lengths(place)))
    return whole


def on_first(
    local: Tensor, shape: Sequence[int], layout: Layout | None, group: TensorParallelGroup, copies: Group | None
) -> Tensor | None:
    """Gather the full tensor of `shape` on the CPU of rank 0, block by block from every rank; None on other ranks.

    `copies` is the process group over which FSDP shards dim 0 of this rank's shard again. A block is sent to its first
    rank, and from there to rank 0 of `group`. If both are the same group, the tensor is sharded by FSDP alone, and one
    step suffices.
    """
    count, copy = (dist.get_world_size(copies), dist.get_rank(copies)) if copies is not None else (1, 0)
    is_one_way = copies is not None and copies == group.process_group
    whole = torch.empty(tuple(shape), dtype=local.dtype) if group.rank == 0 and copy == 0 else None
    if not shape:
        return None if whole is None else whole.copy_(local)
    for rank in [0] if layout is None else sorted({piece.rank for piece in layout.split.pieces}):
        rows = shape[0] if layout is None else layout.local_shape(shape, rank)[0]
        is_mine = rank == group.rank or is_one_way
        for holder, held in enumerate(part[0] for part in chunked(rows, count).ranges):
            for place, part in boxes(shape, layout, rank, held=held, limit=CHUNK_BYTES // local.itemsize):
                box = local[part] if is_mine and copy == holder else None
                if holder != 0 and is_mine:
                    box = _to_first(box, _lengths(place), local.dtype, copies, holder, group.device)
                if rank != 0 and copy == 0:
                    box = _to_first(box, _lengths(place), local.dtype, group.process_group, rank, group.device)
                if whole is not None and box is not None:
                    whole[place].copy_(box)
    return whole


def boxes(
    shape: Sequence[int], layout: Layout | None, rank: int, *, limit: int, held: Range | None = None
) -> Iterator[Box]:
    """Yield the shard of `rank` of a full tensor of `shape` as blocks of at most `limit` elements (at least one).

    `held` is the range of indices of dim 0 of the shard that FSDP leaves on the holder; None: all.
    """
    dim, pieces = (0, [(0, 0, shape[0])]) if layout is None else (layout.dim, _pieces(layout, rank))
    for local, start, length in pieces:
        lengths, in_whole, in_part = list(shape), [0] * len(shape), [0] * len(shape)
        lengths[dim], in_whole[dim], in_part[dim] = length, start, local
        if held is not None:
            first, last = max(in_part[0], held[0]), min(in_part[0] + lengths[0], held[1])
            in_whole[0] += first - in_part[0]
            in_part[0], lengths[0] = first - held[0], last - first
        if all(each > 0 for each in lengths):
            for cut in _cut(lengths, max(limit, 1)):
                yield _moved(cut, in_whole), _moved(cut, in_part)


def _pieces(layout: Layout, rank: int) -> list[tuple[int, int, int]]:
    return [(piece.local, piece.start, piece.length) for piece in layout.split.pieces if piece.rank == rank]


def _cut(lengths: Sequence[int], limit: int) -> Iterator[tuple[Range, ...]]:
    """Split a block of `lengths` along its first dims into blocks of at most `limit` elements."""
    length, rest = lengths[0], prod(lengths[1:])
    if length * rest <= limit:
        yield tuple((0, each) for each in lengths)
        return
    step = max(limit // rest, 1)
    for start in range(0, length, step):
        rows = (start, min(start + step, length))
        if rest <= limit:
            yield rows, *((0, each) for each in lengths[1:])
        else:
            yield from ((rows, *inner) for inner in _cut(lengths[1:], limit))


def _moved(cut: Sequence[Range], by: Sequence[int]) -> Index:
    return tuple(slice(start + offset, stop + offset) for (start, stop), offset in zip(cut, by, strict=True))


def _lengths(index: Index) -> list[int]:
    return [each.stop - each.start for each in index]


def _count(index: Index) -> int:
    return prod(_lengths(index))


def _to_first(
    box: Tensor | None, shape: Sequence[int], dtype: torch.dtype, group: Group | None, sender: int, device: torch.device
) -> Tensor | None:
    """Send the block `box` from `sender` to rank 0 of `group`, which returns it; None on other ranks."""
    own = dist.get_rank(group)
    if own == sender:
        assert box is not None
        dist.send(box.to(device).contiguous().view(-1).view(torch.uint8), group=group, group_dst=0)
    if own != 0:
        return None
    received = torch.empty(tuple(shape), dtype=dtype, device=device)
    dist.recv(received.view(-1).view(torch.uint8), group=group, group_src=sender)
    return received
