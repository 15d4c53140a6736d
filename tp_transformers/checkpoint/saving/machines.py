"""Saves that all copies and machines wait for, and machines that do not see them, as they share no folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from ...logs import get_logger
from ...marks import untyped
from ...ranks.environment import host_of, node_name
from ...ranks.group import TP_AXIS, TensorParallelGroup, agreed, reported

logger = get_logger(__name__)

T = TypeVar("T")


class Sight(NamedTuple):
    """A file of a save, as one machine sees it."""

    machine: str
    writes: bool
    """True on a machine that has written the file."""
    seen: tuple[int, int] | None
    """Bytes and time of the last change; None if the machine has no such file."""


def sight(file: Path, *, writes: bool) -> Sight:
    """Look for a file on this machine."""
    try:
        status = file.stat()
    except OSError:
        return Sight(node_name(), writes, None)
    return Sight(node_name(), writes, (status.st_size, status.st_mtime_ns))


def lacking(sights: Sequence[Sight]) -> list[str]:
    """The host names of the machines that see no file of those that were written."""
    written = {each.seen for each in sights if each.writes} - {None}
    return list(dict.fromkeys(host_of(each.machine) for each in sights if each.seen not in written))


def warn_of_lacking(folder: Path, sights: Sequence[Sight]) -> None:
    """Warn of the machines that do not see a save."""
    if hosts := lacking(sights):
        logger.warning(
            "%s was written on %s; %s not have it: save to a folder that all machines share, or copy it",
            folder,
            ", ".join(dict.fromkeys(host_of(each.machine) for each in sights if each.writes)),
            f"{', '.join(hosts)} {'does' if len(hosts) == 1 else 'do'}",
        )


def on_all_copies(
    group: TensorParallelGroup, file: Path, save: Callable[[], object], *, writes: bool, by_first: bool = False
) -> None:
    """Run `save` on all copies, or on the first one, and return on all ranks when `file` is written.

    Collective over all axes of the mesh. Warns of machines of other copies that do not see the file. Raises the error
    of a copy on every rank; the ranks of that copy agree on one inside `save`.
    """
    if group.mesh is None or group.mesh.size() == group.size:
        save()
        return
    failure: Exception | None = None
    if group.is_first_replica or not by_first:
        try:
            save()
        except Exception as error:
            failure = error
    report = next(filter(None, _of_copies(group, reported(failure))), None)
    if failure is not None:
        raise failure
    if report is not None:
        kind, text = report
        raise agreed(kind(text))
    sights = _of_copies(group, sight(file, writes=writes))
    if group.writes:
        warn_of_lacking(file.parent, sights)


def _of_copies(group: TensorParallelGroup, value: T) -> list[T]:
    """Gather the `value` of the ranks of all copies that hold the same shards as this rank."""
    values = [value]
    for axis in untyped(group.mesh).mesh_dim_names or ():  # one axis after another: no further group is needed
        if axis != TP_AXIS:
            mesh = DeviceMesh.from_group(untyped(group.mesh).get_group(axis), group.device.type)
            gathered = TensorParallelGroup.of_mesh(mesh, group.device).gather(values)
            values = [each for several in gathered for each in several]
    return values
