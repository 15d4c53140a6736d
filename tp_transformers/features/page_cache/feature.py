"""A cold page cache, which the ranks of a node fill together: `tp_prefetch`."""

from __future__ import annotations

from collections.abc import Sequence

from ...seams import Feature, Option


class Prefetch(Option):
    """True: the ranks of a node fill the page cache together. None: if it is cold."""

    name = "prefetch"


class PageCache(Feature):
    """Ranks of a node read a checkpoint that is not in memory once, together."""

    def options(self) -> Sequence[Option]:
        return (Prefetch(),)


FEATURE = PageCache()
