"""Shares that are measured: `tp_shares="memory"` and `tp_shares="speed"`."""

from __future__ import annotations

from collections.abc import Mapping

from ...seams import Feature, Measure


class Shares(Feature):
    """The shares of ranks on devices of unlike memory or speed."""

    requires = ("planner",)

    def measures(self) -> Mapping[str, Measure]:
        from .measures import by_memory, by_speed

        return {"memory": by_memory, "speed": by_speed}


FEATURE = Shares()
