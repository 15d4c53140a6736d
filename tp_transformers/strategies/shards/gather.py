"""Shards -> the whole tensor, on every rank or on the first alone, through buffers of bounded size.

Every shard is cut into boxes of at most CHUNK_BYTES, which travel one after the other and are put in place as they
come. So a rank holds no more than its own request and a few boxes. They travel as bytes, on the device that the
process group communicates on, which need not be that of the tensor: FSDP2 may have offloaded it to the CPU.
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
"""A box of the full tensor, and its place in a rank's shard."""


def on_all(local: Tensor, shape: Sequence[int], layout: Layout, group: Group, device: torch.device) -> Tensor:
    """The whole tensor of `shape` on every rank of `group`, from their `local` shards (all-gathers on `device`)."""
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
    """The whole tensor of `shape` on the CPU of rank 0, sent box by box from every rank; None on the others.

    `copies` are the ranks over which FSDP cuts dim 0 of this rank's shard once more. A box goes to the first of them,
    and from there to rank 0; in one step where they are the ranks of `group` itself, and the tensor is not cut else.
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
    """The boxes of at most `limit` elements (or one) that the whole tensor of `shape` takes from the shard of `rank`.

    `held` are the indices of dim 0 of that shard that there are of it; None is all.
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
    """A box of `lengths` as boxes of at most `limit` elements, cut along its first dims."""
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
    """Send the `box` from `sender` to rank 0 of `group`, which returns it; None on the others."""
    own = dist.get_rank(group)
    if own == sender:
        assert box is not None
        dist.send(box.to(device).contiguous().view(-1).view(torch.uint8), group=group, group_dst=0)
    if own != 0:
        return None
    received = torch.empty(tuple(shape), dtype=dtype, device=device)
    dist.recv(received.view(-1).view(torch.uint8), group=group, group_src=sender)
    return received
