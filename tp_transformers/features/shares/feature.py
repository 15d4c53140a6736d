"""Unequal devices: `tp_shares="memory"` and `tp_shares="speed"`, and `generate` on devices of several kinds."""

from __future__ import annotations

from collections.abc import Mapping

from ...seams import Feature, Measure


class Shares(Feature):
    """Ranks on devices of unlike memory, speed or kind."""

    requires = ("planner",)
    model_methods = (".tokens.UnequalModel",)

    def measures(self) -> Mapping[str, Measure]:
        from .measures import by_memory, by_speed

        return {"memory": by_memory, "speed": by_speed}


FEATURE = Shares()
