"""Processes of ranks: whether the process of another rank runs, on the same machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ...ranks.environment import machine_name


class Process(NamedTuple):
    """A process of some machine; ranks send theirs to each other."""

    machine: str
    namespace: str
    """The namespace of its process id; containers have their own."""
    number: int
    """The process id."""
    began: str
    """Its start in clock ticks since boot, since ids are used again; "" if the system has no /proc."""

    @property
    def runs(self) -> bool:
        """True if it is alive on this machine, and not stopped by a signal or a debugger."""
        own, status = this_process(), status_of(self.number)
        is_here = self.began != "" and (self.machine, self.namespace) == (own.machine, own.namespace)
        return is_here and status[_BEGAN:][:1] == [self.began] and status[0] not in "TtZX"


def this_process() -> Process:
    namespace = "/proc/self/ns/pid"
    name = os.readlink(namespace) if os.path.exists(namespace) else ""
    return Process(machine_name(), name, os.getpid(), "".join(status_of(os.getpid())[_BEGAN:][:1]))


_BEGAN = 19
"""Index of the start time in `status_of`."""


def status_of(process: int) -> list[str]:
    """State, parent, ... of a process: the fields of /proc/<id>/stat that follow its name; [] without such a file."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
