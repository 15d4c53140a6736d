"""Process groups of some ranks, each made once."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class Subgroups:
    """Process groups of some ranks of the default group, each made once.

    They are let go with the default group: a group that somebody still refers to keeps its threads and sockets.
    """

    def __init__(self) -> None:
        self._world: Any = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of `ranks` (world ranks); on others, one of this rank alone.

        torch calls a group by its ranks and by how many groups its process has joined. Ranks that had joined different
        numbers of them would wait for each other forever, so all join as many.
        """
        if self._world is not dist.group.WORLD:
            self._world, self._groups = dist.group.WORLD, {}
        if ranks not in self._groups:
            own = dist.get_rank()
            members = list(ranks) if own in ranks else [own]
            self._groups[ranks] = dist.new_group(members, use_local_synchronization=True)
        return self._groups[ranks]


subgroups = Subgroups()
"""Those of this process."""
