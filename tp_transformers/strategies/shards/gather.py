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
from ...ranks.group import host_or
from ...slices.layout import Layout

CHUNK_BYTES = 16 << 20
"""Bytes that one rank receives at a time."""

Index = tuple[slice, ...]


def on_all(local: Tensor, shape: Sequence[int], layout: Layout, group: Group, device: torch.device) -> Tensor:
    """Gather the full tensor of `shape` on every rank of `group` from `local` shards (all-gathers on `device`)."""
    full = local.new_empty(tuple(shape))
    size, own = dist.get_world_size(group), dist.get_rank(group)
    limit = CHUNK_BYTES // size // local.itemsize
    per_rank = [list(split_blocks(shape, layout, rank, limit=limit)) for rank in range(size)]
    for turn in range(max(map(len, per_rank))):
        of_turn = {rank: blocks[turn] for rank, blocks in enumerate(per_rank) if turn < len(blocks)}
        length = max(full[in_full].numel() for in_full, _ in of_turn.values())
        sent = torch.empty(length, dtype=local.dtype, device=device)
        if own in of_turn:
            block = local[of_turn[own][1]]
            sent[: block.numel()].view(block.shape).copy_(block)
        received = all_gather_uneven(sent.view(torch.uint8), [sent.nbytes] * size, group, dim=0).view(local.dtype)
        for rank, (in_full, _) in of_turn.items():
            place, values = full[in_full], received[rank * length : (rank + 1) * length]
            place.copy_(values[: place.numel()].view(place.shape))
    return full


def on_first(
    local: Tensor, shape: Sequence[int], layout: Layout | None, group: Group | None, device: torch.device
) -> Tensor | None:
    """Gather the full tensor of `shape` on the CPU of rank 0 of `group`, block by block from every rank; None on other
    ranks. `device`: the device of the group.
    """
    own, device = (0, device) if group is None else (dist.get_rank(group), host_or(device, group))
    full = torch.empty(tuple(shape), dtype=local.dtype, device="meta" if own else "cpu")
    for rank in [0] if layout is None else sorted({entry.rank for entry in layout.split.shard_ranges}):
        for in_full, in_shard in split_blocks(shape, layout, rank, limit=CHUNK_BYTES // local.itemsize):
            if own == rank == 0:
                full[in_full].copy_(local[in_shard])
            elif own == rank:
                block = local[in_shard].to(device).contiguous()
                dist.send(block.view(-1).view(torch.uint8), group=group, group_dst=0)
            elif own == 0:
                block = torch.empty(full[in_full].shape, dtype=local.dtype, device=device)
                dist.recv(block.view(-1).view(torch.uint8), group=group, group_src=rank)
                full[in_full].copy_(block)
    return None if own else full


def split_blocks(
    shape: Sequence[int], layout: Layout | None, rank: int, *, limit: int
) -> Iterator[tuple[Index, Index]]:
    """Yield the shard of `rank` of a full tensor of `shape` in blocks of at most `limit` elements (at least one), each
    as an index of the full tensor and as one of the shard.
    """
    if layout is None:
        yield from ((block, block) for block in _split(shape, max(limit, 1)))
        return
    for entry in layout.split.shard_ranges:
        lengths = list(shape)
        lengths[layout.dim] = entry.length
        for block in _split(lengths, max(limit, 1)) if entry.rank == rank else ():
            yield _moved(block, layout.dim, entry.start), _moved(block, layout.dim, entry.local)


def _split(lengths: Sequence[int], limit: int) -> Iterator[Index]:
    """Split a tensor of `lengths` along its first dims into blocks of at most `limit` elements; none if it is empty."""
    if prod(lengths) <= limit:
        yield from [tuple(slice(0, length) for length in lengths)] if 0 not in lengths else ()
        return
    step = max(limit // prod(lengths[1:]), 1)
    for start in range(0, lengths[0], step):
        rows = slice(start, min(start + step, lengths[0]))
        yield from ((rows, *inner) for inner in _split(lengths[1:], limit))


def _moved(block: Index, dim: int, by: int) -> Index:
    span = block[dim]
    return (*block[:dim], slice(span.start + by, span.stop + by), *block[dim + 1 :])
