"""The tensors of a loaded model, with the ranges of them that each rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoint.saving.save import saved_state, values_of
from ...slices.layout import Layout, Range, joined, union
from ...slices.stored import Selection
from ...strategies import layout_of, unsharded_like
from .pieces import Piece, assign


@dataclass(frozen=True)
class Entry:
    """A tensor of the full `shape`; `layout`: the ranges that each old rank holds, None for all of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None

    @staticmethod
    def of(tensor: Tensor) -> Entry:
        return Entry(tuple(unsharded_like(tensor).shape), tensor.dtype, layout_of(tensor))

    @property
    def dim(self) -> int:
        return 0 if self.layout is None else self.layout.dim

    @property
    def length(self) -> int:
        """Length of `dim`; a tensor without dims counts as one of length 1."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def held(self, old: Mapping[int, int]) -> dict[int, Sequence[Range]]:
        """The ranges of `dim` on each rank that holds some; `old`: rank -> its rank in the old group."""
        full = ((0, self.length),)
        return {rank: full if self.layout is None else self.layout.split.ranges[was] for rank, was in old.items()}

    def lost(self, old: Mapping[int, int]) -> int:
        """Bytes that no rank of `old` holds."""
        held = union(bounds for ranges in self.held(old).values() for bounds in ranges)
        return (self.length - sum(b - a for a, b in held)) * self.nbytes // max(self.length, 1)

    def wanted(self, layout: Layout | None, ranks: Collection[int]) -> dict[int, Selection]:
        """What each of the new `ranks` selects of each dim, by its new `layout`."""
        full = tuple(((0, length),) for length in self.shape)
        if layout is None:
            return dict.fromkeys(ranks, full)
        own = {rank: tuple(joined(layout.split.ranges[rank])) or ((0, 0),) for rank in ranks}
        return {rank: (*full[: layout.dim], own[rank], *full[layout.dim + 1 :]) for rank in ranks}

    def sources(
        self, wanted: Mapping[int, Selection], old: Mapping[int, int], sent: Counter[int]
    ) -> dict[int, list[Piece]]:
        """The sources of what each rank wants, as pieces along `dim`; see `assign`."""
        unit = self.nbytes // max(self.length, 1)
        along = {rank: selection[self.dim] if selection else ((0, 1),) for rank, selection in wanted.items()}
        return assign(along, self.held(old), sent, unit)

    def bytes_of(self, selection: Selection, piece: Piece) -> int:
        """Bytes of a piece of what a rank wants."""
        others = [sum(b - a for a, b in ranges) for dim, ranges in enumerate(selection) if dim != self.dim]
        return torch.Size([piece.length, *others]).numel() * self.dtype.itemsize


Table = dict[str, Entry]
"""The tensors by name: parameters and persistent buffers, tied ones once; of packed weights, what a checkpoint has."""


class OldModel:
    """The tensors of a model on one rank, which are freed one after the other."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Collective over the old group if weights are packed."""
        dense, packed = saved_state(model)
        params = dict(model.named_parameters(remove_duplicate=False))
        dense = {name: params.get(name, tensor) for name, tensor in dense.items()}
        self.table: Table = {name: Entry.of(tensor) for name, tensor in (dense | packed).items()}
        self.dense, self.packed = dense, packed.keys()
        self.values: dict[str, Callable[[], Tensor]] = {
            name: partial(values_of, tensor) for name, tensor in (dense | packed).items()
        }
        """This rank's shards; of packed weights they are made when they are asked for."""
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for named in (module._parameters, module._buffers):
                for name, tensor in named.items():
                    if tensor is not None:
                        self._places.setdefault(id(tensor), []).append((module, name))

    def free(self, name: str) -> None:
        """Let go of a tensor: the model has a parameter or buffer without values in its place."""
        if name in self.packed:  # packed weights go all together
            return
        del self.values[name]
        for module, attribute in self._places.get(id(self.dense.pop(name, None)), ()):
            empty = torch.empty(0, device="meta")
            if attribute in module._buffers:
                module._buffers[attribute] = empty
            else:
                module._parameters[attribute] = nn.Parameter(empty, requires_grad=False)


def describe_sources(
    table: Table, layouts: Mapping[str, Layout | None], old: Mapping[int, int], new: Collection[int]
) -> dict[str, dict[tuple[int, int], int]]:
    """Plan: tensor -> (source, new rank) -> bytes; the source is `CHECKPOINT` for what no rank holds."""
    sent: Counter[int] = Counter()
    plan = {}
    for name, entry in table.items():
        wanted, counts = entry.wanted(layouts.get(name), new), Counter[tuple[int, int]]()
        for rank, pieces in entry.sources(wanted, old, sent).items():
            for piece in pieces:
                counts[piece.source, rank] += entry.bytes_of(wanted[rank], piece)
        plan[name] = dict(counts)
    return plan
