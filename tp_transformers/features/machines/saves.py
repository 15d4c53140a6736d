"""Machines that do not see a save, as they share no folder with the one that wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

from ...checkpoint.saving.folder import of_copies
from ...logs import get_logger
from ...ranks.environment import host_of, node_name
from ...ranks.group import TensorParallelGroup

logger = get_logger(__name__)


class Sight(NamedTuple):
    """A file of a save, as one machine sees it."""

    machine: str
    writes: bool
    """True on a machine that has written the file."""
    seen: tuple[int, int] | None
    """Bytes and time of the last change; (0, 0) of a folder, None if the machine has no such file."""


def sight(file: Path, *, writes: bool) -> Sight:
    try:
        status = file.stat()
    except OSError:
        return Sight(node_name(), writes, None)
    return Sight(node_name(), writes, (0, 0) if S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns))


def lacking(sights: Sequence[Sight]) -> list[str]:
    """The host names of the machines that see no file of those that were written."""
    written = {each.seen for each in sights if each.writes} - {None}
    return list(dict.fromkeys(host_of(each.machine) for each in sights if each.seen not in written))


def warn_of_lacking(group: TensorParallelGroup, file: Path, *, writes: bool) -> None:
    """Warn of the machines that do not see a save. Collective over all axes of the mesh."""
    sights = [each for several in of_copies(group, group.gather(sight(file, writes=writes))) for each in several]
    hosts = lacking(sights) if any(each.writes for each in sights) else []
    if group.writes and hosts:
        logger.warning(
            "%s was written on %s; %s not have it: save to a folder that all machines share, or copy it",
            file.parent,
            ", ".join(dict.fromkeys(host_of(each.machine) for each in sights if each.writes)),
            f"{', '.join(hosts)} {'does' if len(hosts) == 1 else 'do'}",
        )
