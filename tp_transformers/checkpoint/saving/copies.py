"""Saves on all copies of a model, which fail together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from ...ranks.group import TP_AXIS, TensorParallelGroup, agreed, reported
from ...seams import features

T = TypeVar("T")


def on_all_copies(
    group: TensorParallelGroup, file: Path, save: Callable[[], object], *, writes: bool, by_first: bool = False
) -> None:
    """Run `save` on all copies, or on the first one, and return on all ranks when `file` is written.

    Collective over all axes of the mesh. `writes`: True on a rank that has written `file`. Raises the error of a copy
    on every rank; the ranks of that copy agree on one inside `save`.
    """
    failure: Exception | None = None
    if group.is_first_replica or not by_first:
        try:
            save()
        except Exception as error:
            failure = error
    report = next(filter(None, of_copies(group, reported(failure))), None)
    if failure is not None:
        raise failure
    if report is not None:
        kind, text = report
        raise agreed(kind(text))
    for feature in features().values():
        feature.after_save(group, file, writes=writes)


def of_copies(group: TensorParallelGroup, value: T) -> list[T]:
    """Gather the `value` of the ranks of all copies that hold the same shards as this rank."""
    values = [value]
    for axis in (group.mesh.mesh_dim_names or ()) if group.mesh is not None else ():  # in turn: no further group
        if axis != TP_AXIS and group.mesh is not None:
            mesh = DeviceMesh.from_group(group.mesh.get_group(axis), group.device.type)
            gathered = TensorParallelGroup.of_mesh(mesh, group.device).gather(values)
            values = [each for several in gathered for each in several]
    return values
