"""Report of a model's partition: sharded and replicated modules of each rank, and the ranks of each group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ...anatomy import folded, layer_number
from ...errors import UnsupportedError, spans
from ...ranks.group import GROUP
from ...ranks.mesh import ranks_of_copies
from ...strategies.signature import BATCH


@dataclass(frozen=True)
class Partition:
    """A model's modules over the ranks; `str` has a line for each group and each rank.

    Replicated modules are listed by name, sharded ones as `name:r` for shard r. Equal layers are folded into one entry
    with `*`, or with their numbers.
    """

    tp_groups: tuple[tuple[int, ...], ...]
    """The ranks of each copy of the model."""
    dp_groups: tuple[tuple[int, ...], ...]
    """The ranks that have different batches and average gradients of replicated parameters."""
    shard_groups: tuple[tuple[int, ...], ...]
    """The ranks that hold the same shards."""
    modules: tuple[tuple[str, bool], ...]
    """(folded name, True if it is sharded), in the model's order."""

    def held(self, tp_rank: int) -> list[str]:
        """Return the entries of a rank of the `tp` axis."""
        return [f"{name}:{tp_rank}" if is_sharded else name for name, is_sharded in self.modules]

    def __str__(self) -> str:
        groups = [("TP_GROUP", self.tp_groups), ("DP_GROUP", self.dp_groups)]
        if self.shard_groups != self.dp_groups:
            groups.append(("DP_GROUP of shards", self.shard_groups))
        lines = [f"{title}: {', '.join(str(list(ranks)) for ranks in rank_lists)}" for title, rank_lists in groups]
        places = {rank: position for group in self.dp_groups for position, rank in enumerate(group)}
        for rank, tp_rank in sorted(
            (rank, position) for group in self.tp_groups for position, rank in enumerate(group)
        ):
            lines.append(f"dp_rank {places[rank]} (tp_rank {tp_rank}): {', '.join(self.held(tp_rank))}")
        return "\n".join(lines)


def partition(model: PreTrainedModel, mesh: DeviceMesh | None = None, *, axis: str = "dp") -> Partition:
    """Return the partition of `model` over the ranks. Not collective.

    Args:
        model: a model that was loaded with `tp_plan`.
        mesh: a mesh with the axes `axis` and `tp`; None: the mesh of `data_parallel`, or one copy of the model.
        axis: name of the data-parallel axis.

    Raises:
        UnsupportedError: for a model without a plan.
    """
    group = GROUP.find(model)
    if group is None:
        raise UnsupportedError("partition needs a model that was loaded with tp_plan")
    copies = ranks_of_copies(mesh, axis) if mesh is not None else group.copies or (tuple(group.global_ranks),)
    resolution = model.tp_resolution
    split = {name for name, strategy in resolution.module_strategies.items() if strategy.signature.takes is BATCH}
    entries = []
    for name, module in _entries(model, split):
        layouts = (resolution.layouts.get(f"{name}.{param}") for param, _ in module.named_parameters())
        entries.append((name, len(copies[0]) > 1 and any(layout is not None for layout in layouts)))
    shard_groups = tuple(zip(*copies, strict=True))
    all_ranks = (tuple(rank for ranks in copies for rank in ranks),)
    return Partition(copies, all_ranks if split else shard_groups, shard_groups, tuple(_folded(entries)))


def _entries(module: nn.Module, split: set[str], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the entries of a partition: children of layers, and modules with parameters outside layers."""
    for step, child in module.named_children():
        path = f"{name}.{step}".lstrip(".")
        if not _has_parameters(child):
            continue
        has_own = any(True for _ in child.parameters(recurse=False))
        if path in split or has_own or not any(True for _ in child.children()):
            yield path, child
        elif isinstance(module, nn.ModuleList):
            yield from (
                (f"{path}.{child_name}", grandchild)
                for child_name, grandchild in child.named_children()
                if _has_parameters(grandchild)
            )
        else:
            yield from _entries(child, split, path)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _folded(entries: list[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Fold names of layers to `*`, or to lists of layer numbers if some are sharded and others not."""
    for pattern, by_state in folded(entries).items():
        for is_sharded, names in by_state.items():
            if len(by_state) == 1:
                yield pattern, is_sharded
                continue
            numbers = [number for name in names if (number := layer_number(name)) is not None]
            yield pattern.replace("*", spans(numbers), 1), is_sharded


def head_counts(model: Any) -> dict[str, tuple[int, int]]:
    """(query heads, KV heads) of this rank, by the name of each attention that is sharded over the ranks."""
    group = GROUP.find(model)
    if group is None:
        raise UnsupportedError("head_counts needs a model that was loaded with tp_plan")
    attention = model.tp_resolution.attention.items()
    return {name: (heads.query.widths[group.rank], heads.kv.widths[group.rank]) for name, heads in attention}
