"""Unequal devices: `tp_shares`, and `generate` on devices of several kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...seams import Feature, Option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...loading.request import LoadRequest
    from ...plans.rules import Plan
    from ...ranks.group import TensorParallelGroup


class SharesOfRanks(Option):
    """The share of each rank: positive numbers, "memory" or "speed". None: as TP_TRANSFORMERS_SHARES is set."""

    name = "shares"
    expected, example = 'a positive number for each rank, "memory" or "speed"', "[2, 1, 1] on three ranks"

    def fits(self, value: Any) -> bool:
        from ..command_line.arguments import is_shares

        return value is None or is_shares(value)


class Shares(Feature):
    """Ranks on devices of unlike memory, speed or kind."""

    requires = ("command_line", "planner")
    options = (SharesOfRanks(),)
    model_methods = (".tokens.UnequalModel",)

    def shares(
        self, plan: Plan, model: PreTrainedModel, group: TensorParallelGroup, request: LoadRequest
    ) -> tuple[tuple[float, ...] | None, str]:
        from .resolve import resolve_shares

        return resolve_shares(plan, model, group, request)


FEATURE = Shares()
