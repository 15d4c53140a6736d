"""Layouts of the stored tensors of packed weights, for saves of a packed model.

A rank holds ranges of one dim of a stored tensor, for one parameter or several. At group boundaries two ranks may hold
the same indices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...checkpoint.saving.save import STORED_VALUES
from ...errors import UnsupportedError
from ...ranks.group import TensorParallelGroup
from ...slices.layout import Layout, Range, Split, joined
from ...slices.lazy import Resident
from ...strategies import SHARD
from ...strategies.shards.shard import ParamShard
from ..quantized.bundle import Origin, Place
from ..quantized.find import Quantization
from ..quantized.format import owners
from .tiled import Tiled
from .weight import HeldWeight, PackedWeight, packed_weights


@dataclass(frozen=True)
class PackedCheckpoint:
    """Data of a quantised checkpoint that a packed model keeps for saves: its `StoredForm`."""

    quantization: Quantization | None = None
    """None if the weights were quantised as they arrived."""
    beside: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Stored tensors that no weight value depends on."""
    unpacked: Sequence[str] = ()
    """Quantised parameters that were dequantised anyway."""

    def state(self, model: nn.Module, group: TensorParallelGroup) -> dict[str, torch.Tensor]:
        """See `StoredForm.state`. Raises UnsupportedError if a quantised weight is not packed."""
        with group.agree():
            self.check_written()
            if self.unpacked:
                raise _unsaved(f"the quantised {self.unpacked[0]} dequantised", "all of them packed")
            stored = StoredShards(packed_weights(model).values())
            specs = stored.specs()
        layouts = stored_layouts(group.gather(specs))
        state = place_stored(layouts, group, stored)
        return state | self.beside_of(state)

    def check_written(self) -> None:
        """Raise UnsupportedError if packed weights of this format cannot be saved."""
        if self.quantization is None:
            raise _unsaved("weights that were quantised as they arrived", "those of a checkpoint")
        if not self.quantization.format.is_written:
            raise _unsaved(f"one in {self.quantization.format.title}, which is only read", "another format")

    def as_stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.quantization is None else self.quantization.format.as_stored(name, tensor)

    def put_into(self, config: Any) -> None:
        if self.quantization is not None:
            self.quantization.put_into(config)

    def beside_of(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Select tensors of `beside` in modules that have one of `names`, or whose names extend one of them."""
        modules = {owner for name in names for owner in owners(name)}
        return {
            name: tensor
            for name, tensor in self.beside.items()
            if name.rpartition(".")[0] in modules or any(owner in names for owner in owners(name))
        }


@dataclass(frozen=True)
class StoredSpec:
    """Shape and dtype of a stored tensor, and the ranges that a rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    """The sharded dim; None if the rank holds the full tensor."""
    ranges: tuple[Range, ...] = ()
    scalar: torch.Tensor | None = None
    """The value of a zero-dim tensor."""


@dataclass(frozen=True)
class StoredShard:
    """The slice of a stored tensor that belongs to one packed weight."""

    origin: Origin
    dim: int | None
    """The sharded dim; None if it is the full tensor."""
    matrix: Tiled
    key: str

    def values(self) -> torch.Tensor:
        """See `Tiled.stored`."""
        return self.matrix.stored(self.key).detach()


class StoredShards:
    """The stored tensors of a rank's packed weights."""

    def __init__(self, weights: Iterable[HeldWeight]) -> None:
        self._shards: dict[str, list[StoredShard]] = {}
        for weight in (weight for weight in weights if isinstance(weight, PackedWeight)):
            for block in weight.blocks:
                for key, origin in block.matrix.decoded.origins.items():
                    if not origin.name:  # made by the load
                        continue
                    sharded_dims = [
                        dim for dim, length in enumerate(origin.shape) if _count(origin.places[dim]) != length
                    ]
                    if len(sharded_dims) > 1:
                        raise _unsaved(f"{origin.name} sharded along {len(sharded_dims)} dims", "one")
                    dim = sharded_dims[0] if sharded_dims else None
                    self._shards.setdefault(origin.name, []).append(StoredShard(origin, dim, block.matrix, key))

    def specs(self) -> dict[str, StoredSpec]:
        """Return the specs of the rank's stored tensors, by name."""
        return {name: self._spec(shards) for name, shards in self._shards.items()}

    def _spec(self, shards: Sequence[StoredShard]) -> StoredSpec:
        origin, dims = shards[0].origin, {shard.dim for shard in shards}
        if len(dims - {None}) > 1:
            raise _unsaved("a stored tensor sharded along several dims", "one")
        dim = None if None in dims else shards[0].dim
        places = [] if dim is None else [place for shard in shards for place in shard.origin.places[dim]]
        scalar = None if origin.shape else shards[0].values()
        scalar = None if scalar is None or scalar.is_meta else scalar.cpu()
        ranges = tuple((start, start + count) for start, _, count in places)
        return StoredSpec(origin.shape, origin.dtype, dim, ranges, scalar)

    def local(self, name: str, spec: StoredSpec, layout: Layout | None, rank: int) -> torch.Tensor:
        """Return the shard of `rank` (this rank) in `layout`; a view if the indices are contiguous in memory."""
        shards = sorted(self._shards.get(name, []), key=lambda shard: shard.dim is not None)  # complete ones first
        if layout is None:
            value = next((shard.values() for shard in shards if shard.dim is None), spec.scalar)
            assert value is not None
            return value
        parts: list[tuple[StoredShard, list[Range]]] = []
        for start, stop in layout.split.ranges[rank]:
            shard, position = next(
                (shard, position + start - first)
                for shard in shards
                for first, position, count in shard.origin.places[layout.dim]
                if first <= start and stop <= first + count
            )
            if not parts or parts[-1][0] is not shard:
                parts.append((shard, []))
            parts[-1][1].append((position, position + stop - start))
        if not parts:
            return torch.empty(layout.local_shape(spec.shape, rank), dtype=spec.dtype)
        views = [Resident(shard.values()).select(layout.dim, joined(ranges)).tensor for shard, ranges in parts]
        return views[0] if len(views) == 1 else torch.cat(views, layout.dim)


def stored_layouts(ranks: Sequence[Mapping[str, StoredSpec]]) -> dict[str, tuple[StoredSpec, Layout | None]]:
    """Combine the specs of all ranks into a spec and the layout of every tensor.

    Raises UnsupportedError if the ranks together do not hold a full tensor.
    """
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: _layout(name, [rank.get(name) for rank in ranks]) for name in names}


def _layout(name: str, per_rank: Sequence[StoredSpec | None]) -> tuple[StoredSpec, Layout | None]:
    present = [spec for spec in per_rank if spec is not None]
    first = next((spec for spec in present if spec.dim is not None), present[0])
    if not first.shape or all(spec is not None and spec.dim is None for spec in per_rank):
        return first, None
    dim = first.dim or 0
    length = first.shape[dim]
    ranges = [() if spec is None else spec.ranges if spec.dim is not None else ((0, length),) for spec in per_rank]
    ends = sorted({0, length, *(end for rank in ranges for bounds in rank for end in bounds)})
    intervals = list(pairwise(ends))
    split = Split(
        length,
        tuple(
            tuple((a, b) for a, b in intervals if any(start <= a and b <= end for start, end in rank))
            for rank in ranges
        ),
    )
    if any(spec.dim not in (None, dim) for spec in present) or not split.is_complete:
        raise _unsaved(f"{name}, of which the ranks do not hold all", "all")
    return first, Layout(dim, split)


def place_stored(
    layouts: Mapping[str, tuple[StoredSpec, Layout | None]],
    group: TensorParallelGroup,
    stored: StoredShards | None = None,
) -> dict[str, torch.Tensor]:
    """Return placeholders on the meta device, marked with their `ParamShard`; the values are those of `stored`."""
    state = {}
    for name, (spec, layout) in layouts.items():
        shape = spec.shape if layout is None else layout.local_shape(spec.shape, group.rank)
        state[name] = torch.empty(shape, dtype=spec.dtype, device="meta")
        if stored is not None:
            STORED_VALUES.put(state[name], partial(stored.local, name, spec, layout, group.rank))
        shard = ParamShard(torch.Size(spec.shape), layout, group, use_dtensor=False)
        SHARD.put(state[name], shard)
    return state


def _count(places: Sequence[Place]) -> int:
    return sum(count for _, _, count in places)


def _unsaved(got: str, expected: str) -> UnsupportedError:
    fix = "Load it with tp_dequantize=True, or without quantization_config."
    return UnsupportedError("a save of a packed model", got=got, expected=expected, fix=fix)
