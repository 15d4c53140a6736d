"""Collectives of CPU tensors through memory that the ranks of a machine share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ...ranks.transport import Transport


class SharedMemory(Feature):
    """Ranks sum through memory that all of them map, instead of by gloo."""

    requires = ("places",)

    def transport(self, group: ProcessGroup) -> Transport | None:
        from .joining import share

        return share(group)


FEATURE = SharedMemory()
