"""Machines that do not see a save, since they do not share its folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...logs import get_logger
from ...ranks.environment import host_of, local_size, node_name
from ...ranks.group import TensorParallelGroup

logger = get_logger(__name__)


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


def warn_of_copies(group: TensorParallelGroup) -> None:
    """Warn once if other machines have copies of the model: those do not take part in a save of the first copy."""
    ranks, local = 1 if group.mesh is None else group.mesh.size(), local_size()
    if ranks > group.size and local is not None and ranks > local:
        _warn_of_copies()


@cache
def _warn_of_copies() -> None:
    host = host_of(node_name())
    logger.warning("saves are on %s; machines of other copies have them only if they share the folder", host)
