"""The modules that each rank holds, or its part of them, and the ranks of every group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ..anatomy.names import folded, layer_number
from ..errors import UnsupportedError
from ..plans.bind import Resolution
from ..ranks.group import GROUP
from ..strategies.signature import BATCH
from ..text import spans
from .data_parallel import ranks_of


@dataclass(frozen=True)
class Partition:
    """A model's modules over the ranks; as text, a line for every group and every rank.

    Modules that every rank of a `tp` axis holds whole stand there by their names, the others with `:r`: their part
    number r. Layers that are alike are one, `*` or their numbers.
    """

    tp_groups: tuple[tuple[int, ...], ...]
    """The ranks that share each copy of the model."""
    dp_groups: tuple[tuple[int, ...], ...]
    """The ranks that have batches of their own, and the same gradients of parameters that they all hold in full."""
    part_groups: tuple[tuple[int, ...], ...]
    """The ranks that hold the same parts."""
    modules: tuple[tuple[str, bool], ...]
    """(folded name, whether it is partitioned), in the model's order."""

    def held(self, tp_rank: int) -> list[str]:
        """The part that a rank of the `tp` axis holds."""
        return [f"{name}:{tp_rank}" if is_cut else name for name, is_cut in self.modules]

    def __str__(self) -> str:
        groups = [("TP_GROUP", self.tp_groups), ("DP_GROUP", self.dp_groups)]
        if self.part_groups != self.dp_groups:
            groups.append(("DP_GROUP of parts", self.part_groups))
        lines = [f"{title}: {', '.join(str(list(ranks)) for ranks in found)}" for title, found in groups]
        places = {rank: at for group in self.dp_groups for at, rank in enumerate(group)}
        for rank, tp_rank in sorted((rank, at) for group in self.tp_groups for at, rank in enumerate(group)):
            lines.append(f"dp_rank {places[rank]} (tp_rank {tp_rank}): {', '.join(self.held(tp_rank))}")
        return "\n".join(lines)


def partition(model: PreTrainedModel, mesh: DeviceMesh | None = None, *, axis: str = "dp") -> Partition:
    """How `model` is partitioned over the ranks; any rank may ask, by itself.

    Args:
        model: a model that was loaded with `tp_plan`.
        mesh: a mesh with the axes `axis` and `tp`; None for the one that `data_parallel` was given, or else for one
            copy of the model.
        axis: name of the data-parallel axis.

    Raises:
        UnsupportedError: for a model without a plan.
    """
    group = GROUP.find(model)
    if group is None:
        raise UnsupportedError("partition needs a model that was loaded with tp_plan")
    copies = ranks_of(mesh, axis) if mesh is not None else group.copies or (tuple(group.global_ranks),)
    return partition_of(model, model.tp_resolution, copies)


def partition_of(model: nn.Module, resolution: Resolution, copies: tuple[tuple[int, ...], ...]) -> Partition:
    """The same of a model on the meta device with a bound plan; `copies` are the ranks of each copy of it."""
    split = {name for name, strategy in resolution.module_strategies.items() if strategy.signature.takes is BATCH}
    units = []
    for name, module in _units(model, split):
        layouts = (resolution.layouts.get(f"{name}.{param}") for param, _ in module.named_parameters())
        units.append((name, len(copies[0]) > 1 and any(layout is not None for layout in layouts)))
    parts = tuple(zip(*copies, strict=True))
    everyone = (tuple(rank for ranks in copies for rank in ranks),)
    return Partition(copies, everyone if split else parts, parts, tuple(_folded(units)))


def _units(module: nn.Module, split: set[str], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Entries of a partition: the parts of layers, and modules with parameters outside layers."""
    for step, child in module.named_children():
        path = f"{name}.{step}".lstrip(".")
        if not _has_parameters(child):
            continue
        has_own = any(True for _ in child.parameters(recurse=False))
        if path in split or has_own or not any(True for _ in child.children()):
            yield path, child
        elif isinstance(module, nn.ModuleList):
            yield from ((f"{path}.{part}", each) for part, each in child.named_children() if _has_parameters(each))
        else:
            yield from _units(child, split, path)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _folded(units: list[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Names with `*` for the numbers of layers that are alike, or with their numbers where some are not."""
    for pattern, found in folded(units).items():
        for is_cut, names in found.items():
            if len(found) == 1:
                yield pattern, is_cut
                continue
            numbers = [number for name in names if (number := layer_number(name)) is not None]
            yield pattern.replace("*", spans(numbers), 1), is_cut
