"""Layouts of the stored tensors of packed weights, for saves of a packed model.

A rank holds ranges of one dim of a stored tensor, for one parameter or several. At group boundaries two ranks may hold
the same indices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from ...errors import UnsupportedError
from ...marks import Mark
from ...ranks.group import TensorParallelGroup
from ...slices.bundle import Place
from ...slices.layout import Layout, Range, Split
from ...strategies import SHARD
from ...strategies.shards.shard import ParamShard
from .format import Quantization
from .packed import HeldWeight, PackedWeight, packed_weights


@dataclass(frozen=True)
class PackedCheckpoint:
    """Data of a quantised checkpoint that a packed model keeps for saves."""

    quantization: Quantization
    beside: Mapping[str, torch.Tensor]
    """Stored tensors that no weight value depends on."""
    unpacked: Sequence[str]
    """Quantised parameters that were dequantised anyway."""


PACKED_CHECKPOINT: Mark[PackedCheckpoint] = Mark("tp_packed_checkpoint")
"""Set on models with packed weights."""


@dataclass(frozen=True)
class Outline:
    """Shape and dtype of a stored tensor, and the ranges that a rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    """The sharded dim; None if the rank holds the full tensor."""
    ranges: tuple[Range, ...] = ()
    scalar: torch.Tensor | None = None
    """The value of a zero-dim tensor."""


Pieces = list[tuple[int | None, Sequence[Place], torch.Tensor]]
"""Shards of one stored tensor: (sharded dim, places of the indices in the shard, shard)."""


class Members:
    """The stored tensors of a rank's packed weights."""

    def __init__(self, weights: Iterable[HeldWeight]) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, Pieces] = {}
        for weight in (weight for weight in weights if isinstance(weight, PackedWeight)):
            for decoded, *_ in weight.places:
                for key, origin in decoded.origins.items():
                    if not origin.name:  # made by the load
                        continue
                    cut = [dim for dim, length in enumerate(origin.shape) if _held(origin.places[dim]) != length]
                    if len(cut) > 1:
                        raise _unsaved(f"{origin.name} cut along {len(cut)} dims", "one")
                    dim = cut[0] if cut else None
                    self._shapes[origin.name] = origin.shape
                    places = [] if dim is None else origin.places[dim]
                    self._pieces.setdefault(origin.name, []).append((dim, places, decoded.parts[key]))

    def outlines(self) -> dict[str, Outline]:
        """Return the outlines of the rank's stored tensors, by name."""
        return {name: self._outline(self._shapes[name], pieces) for name, pieces in self._pieces.items()}

    def _outline(self, shape: tuple[int, ...], pieces: Pieces) -> Outline:
        part = pieces[0][2]
        dim = next((None for dim, _, _ in pieces if dim is None), pieces[0][0])
        if len({dim for dim, _, _ in pieces if dim is not None}) > 1:
            raise _unsaved("a stored tensor cut along several dims", "one")
        ranges = () if dim is None else tuple((at, at + count) for _, places, _ in pieces for at, _, count in places)
        return Outline(shape, part.dtype, dim, ranges, None if shape or part.is_meta else part.cpu())

    def local(self, name: str, outline: Outline, layout: Layout | None, rank: int) -> torch.Tensor:
        """Return the shard of `rank` (this rank) in `layout`; a view if the indices are contiguous in memory."""
        pieces = self._pieces.get(name, [])
        complete = next((part for dim, _, part in pieces if dim is None), None)
        if layout is None:
            found = outline.scalar if complete is None else complete.detach()
            assert found is not None
            return found
        dim, runs = layout.dim, []
        for start, stop in layout.split.ranges[rank]:
            if complete is not None:
                runs.append((complete, start, stop - start))
                continue
            part, position = next(
                (part, position + start - at)
                for _, places, part in pieces
                for at, position, count in places
                if at <= start and stop <= at + count
            )
            if runs and runs[-1][0] is part and runs[-1][1] + runs[-1][2] == position:
                runs[-1] = (part, runs[-1][1], runs[-1][2] + stop - start)
            else:
                runs.append((part, position, stop - start))
        if not runs:
            return torch.empty(layout.local_shape(outline.shape, rank), dtype=outline.dtype)
        views = [part.narrow(dim, position, count) for part, position, count in runs]
        return views[0] if len(views) == 1 else torch.cat(views, dim)


def member_layouts(ranks: Sequence[Mapping[str, Outline]]) -> dict[str, tuple[Outline, Layout | None]]:
    """Combine the outlines of all ranks into an outline and the layout of every tensor.

    Raises UnsupportedError if the ranks together do not hold a full tensor.
    """
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: _layout(name, [rank.get(name) for rank in ranks]) for name in names}


def _layout(name: str, held: Sequence[Outline | None]) -> tuple[Outline, Layout | None]:
    found = [each for each in held if each is not None]
    first = next((each for each in found if each.dim is not None), found[0])
    if not first.shape or all(each is not None and each.dim is None for each in held):
        return first, None
    dim = first.dim or 0
    length = first.shape[dim]
    ranges = [() if each is None else each.ranges if each.dim is not None else ((0, length),) for each in held]
    ends = sorted({0, length, *(end for rank in ranges for each in rank for end in each)})
    parts = list(pairwise(ends))
    split = Split(
        length,
        tuple(tuple((a, b) for a, b in parts if any(at <= a and b <= end for at, end in rank)) for rank in ranges),
    )
    if any(each.dim not in (None, dim) for each in found) or not split.is_cut:
        raise _unsaved(f"{name}, of which the ranks do not hold all", "all")
    return first, Layout(dim, split)


def packed_state(model: nn.Module, group: TensorParallelGroup) -> dict[str, torch.Tensor]:
    """Return this rank's shards of the stored tensors of packed weights, by their names in the checkpoint.

    Collective: call on all ranks. Raises UnsupportedError if a quantised weight is not packed.
    """
    with group.agree():
        kept = PACKED_CHECKPOINT.find(model)
        if kept is None:
            raise _unsaved("weights that were quantised as they arrived", "those of a checkpoint")
        if kept.unpacked:
            raise _unsaved(f"the quantised {kept.unpacked[0]} dequantised", "all of them packed")
        members = Members(packed_weights(model).values())
        outlines = members.outlines()
    layouts = member_layouts(group.gather(outlines))
    state = place_members(layouts, group, members)
    return state | beside(kept, state)


def place_members(
    layouts: Mapping[str, tuple[Outline, Layout | None]],
    group: TensorParallelGroup,
    members: Members | None = None,
) -> dict[str, torch.Tensor]:
    """Return this rank's shards, marked with their `ParamShard`; on the meta device if there are no `members`."""
    state = {}
    for name, (outline, layout) in layouts.items():
        if members is None:
            shape = outline.shape if layout is None else layout.local_shape(outline.shape, group.rank)
            state[name] = torch.empty(shape, dtype=outline.dtype, device="meta")
        else:
            state[name] = members.local(name, outline, layout, group.rank).detach()
        shard = ParamShard(torch.Size(outline.shape), layout, group, use_dtensor=False)
        SHARD.put(state[name], shard)
    return state


def beside(kept: PackedCheckpoint, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Select tensors of `kept.beside` in modules that have one of `names`, or whose names extend one of them."""
    modules = {owner for name in names for owner in _owners(name)}
    return {
        name: tensor
        for name, tensor in kept.beside.items()
        if name.rpartition(".")[0] in modules or any(owner in names for owner in _owners(name))
    }


def _owners(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _held(places: Sequence[Place]) -> int:
    return sum(count for _, _, count in places)


def _unsaved(got: str, expected: str) -> UnsupportedError:
    fix = "Load it with tp_dequantize=True, or without quantization_config."
    return UnsupportedError("a save of a packed model", got=got, expected=expected, fix=fix)
