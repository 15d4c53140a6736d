"""A cold page cache, which the ranks of a node fill together: `tp_prefetch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ...seams import Feature, Option

if TYPE_CHECKING:
    from ...checkpoint.reading.header import Checkpoint
    from ...checkpoint.reading.jobs import Request
    from ...loading.options import Options
    from ...ranks.group import TensorParallelGroup


class Prefetch(Option):
    """True: the ranks of a node fill the page cache together. None: if it is cold."""

    name = "prefetch"


class PageCache(Feature):
    """Ranks of a node read a checkpoint that is not in memory once, together."""

    options = (Prefetch(),)

    def around_imports(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        from .ahead import reading_ahead

        return reading_ahead(args, kwargs)

    def around_reads(
        self, checkpoint: Checkpoint, requests: Sequence[Request], group: TensorParallelGroup, options: Options
    ) -> AbstractContextManager[Mapping[str, int]]:
        from .ahead import stop
        from .prefetch import prefetching

        stop()
        return prefetching(checkpoint.opened, requests, group, wanted=options.get("tp_prefetch"))


FEATURE = PageCache()
