"""Gather the full tensor from its shards, on every rank or on rank 0 alone, through buffers of bounded size.

Shards are split into blocks of at most CHUNK_BYTES, which are sent one after the other and copied into the full tensor.
So a rank holds the full tensor, if it asked for it, and a few blocks. Blocks are sent as bytes, to all on the device
of the process group, to rank 0 from the CPU where the group can; the tensor may be on another device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ...ranks.collectives import Group, all_gather_uneven
from ...ranks.group import TensorParallelGroup, host_or
from ...slices.layout import Layout, Range, chunked

CHUNK_BYTES = 16 << 20
"""Bytes that one rank receives at a time."""

Index = tuple[slice, ...]
BlockIndices = tuple[Index, Index]
"""The same block as an index of the full tensor, and as an index of a rank's shard."""


def on_all(local: Tensor, shape: Sequence[int], layout: Layout, group: Group, device: torch.device) -> Tensor:
    """Gather the full tensor of `shape` on every rank of `group` from `local` shards (all-gathers on `device`)."""
    full = local.new_empty(tuple(shape))
    size, own = dist.get_world_size(group), dist.get_rank(group)
    limit = CHUNK_BYTES // size // local.itemsize
    per_rank = [list(split_blocks(shape, layout, rank, limit=limit)) for rank in range(size)]
    for turn in range(max(map(len, per_rank))):
        of_turn = {rank: blocks[turn] for rank, blocks in enumerate(per_rank) if turn < len(blocks)}
        length = max(_count(in_full) for in_full, _ in of_turn.values())
        sent = torch.empty(length, dtype=local.dtype, device=device)
        if own in of_turn:
            in_full, in_shard = of_turn[own]
            sent[: _count(in_full)].view(_lengths(in_full)).copy_(local[in_shard])
        received = all_gather_uneven(sent.view(torch.uint8), [sent.nbytes] * size, group, dim=0).view(local.dtype)
        for rank, (in_full, _) in of_turn.items():
            start = rank * length
            full[in_full].copy_(received[start : start + _count(in_full)].view(_lengths(in_full)))
    return full


def on_first(
    local: Tensor, shape: Sequence[int], layout: Layout | None, group: TensorParallelGroup, copies: Group | None
) -> Tensor | None:
    """Gather the full tensor of `shape` on the CPU of rank 0, block by block from every rank; None on other ranks.

    `copies` is the process group over which dim 0 of this rank's shard is sharded again. A block is sent to its first
    rank, and from there to rank 0 of `group`. If both are the same group, the tensor is sharded over it alone, and one
    step suffices.
    """
    count, copy = (dist.get_world_size(copies), dist.get_rank(copies)) if copies is not None else (1, 0)
    is_one_way = copies is not None and copies == group.process_group
    full = torch.empty(tuple(shape), dtype=local.dtype) if group.rank == 0 and copy == 0 else None
    if not shape:
        return None if full is None else full.copy_(local)
    for rank in [0] if layout is None else sorted({entry.rank for entry in layout.split.shard_ranges}):
        rows = shape[0] if layout is None else layout.local_shape(shape, rank)[0]
        is_mine = rank == group.rank or is_one_way
        for holder, held in enumerate(ranges[0] for ranges in chunked(rows, count).ranges):
            for in_full, in_shard in split_blocks(shape, layout, rank, held=held, limit=CHUNK_BYTES // local.itemsize):
                block = local[in_shard] if is_mine and copy == holder else None
                if holder != 0 and is_mine:
                    block = _to_first(block, _lengths(in_full), local.dtype, copies, holder, group.device)
                if rank != 0 and copy == 0:
                    block = _to_first(block, _lengths(in_full), local.dtype, group.process_group, rank, group.device)
                if full is not None and block is not None:
                    full[in_full].copy_(block)
    return full


def split_blocks(
    shape: Sequence[int], layout: Layout | None, rank: int, *, limit: int, held: Range | None = None
) -> Iterator[BlockIndices]:
    """Yield the shard of `rank` of a full tensor of `shape` as blocks of at most `limit` elements (at least one).

    `held` is the range of indices of dim 0 of the shard on the holder; None: all.
    """
    dim, ranges = (0, [(0, 0, shape[0])]) if layout is None else (layout.dim, _ranges(layout, rank))
    for local, start, length in ranges:
        lengths, in_full, in_shard = list(shape), [0] * len(shape), [0] * len(shape)
        lengths[dim], in_full[dim], in_shard[dim] = length, start, local
        if held is not None:
            first, last = max(in_shard[0], held[0]), min(in_shard[0] + lengths[0], held[1])
            in_full[0] += first - in_shard[0]
            in_shard[0], lengths[0] = first - held[0], last - first
        if min(lengths) > 0:
            for block in _split(lengths, max(limit, 1)):
                yield _moved(block, in_full), _moved(block, in_shard)


def _ranges(layout: Layout, rank: int) -> list[tuple[int, int, int]]:
    """(start in the shard, start in the full tensor, length) of every range that is read from `rank`."""
    return [(entry.local, entry.start, entry.length) for entry in layout.split.shard_ranges if entry.rank == rank]


def _split(lengths: Sequence[int], limit: int) -> Iterator[tuple[Range, ...]]:
    """Split a block of `lengths` along its first dims into blocks of at most `limit` elements."""
    length, rest = lengths[0], prod(lengths[1:])
    if length * rest <= limit:
        yield tuple((0, stop) for stop in lengths)
        return
    step = max(limit // rest, 1)
    for start in range(0, length, step):
        rows = (start, min(start + step, length))
        if rest <= limit:
            yield rows, *((0, stop) for stop in lengths[1:])
        else:
            yield from ((rows, *inner) for inner in _split(lengths[1:], limit))


def _moved(block: Sequence[Range], by: Sequence[int]) -> Index:
    return tuple(slice(start + offset, stop + offset) for (start, stop), offset in zip(block, by, strict=True))


def _lengths(index: Index) -> list[int]:
    return [span.stop - span.start for span in index]


def _count(index: Index) -> int:
    return prod(_lengths(index))


def _to_first(
    block: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    group: Group | None,
    sender: int,
    device: torch.device,
) -> Tensor | None:
    """Send the `block` of `sender` to rank 0 of `group`, which returns it; None on other ranks."""
    own, device = dist.get_rank(group), host_or(device, group)
    if own == sender:
        assert block is not None
        dist.send(block.to(device).contiguous().view(-1).view(torch.uint8), group=group, group_dst=0)
    if own != 0:
        return None
    received = torch.empty(tuple(shape), dtype=dtype, device=device)
    dist.recv(received.view(-1).view(torch.uint8), group=group, group_src=sender)
    return received
