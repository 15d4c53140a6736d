"""Inference of plans: `tp_plan="infer"` and `tp-transformers suggest`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...seams import Feature, Planner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADVICE = (
    'Pass tp_plan="infer", which finds one in a small model of it. Or let one be written and proven: tp-transformers '
    "suggest MODEL plan.yaml."
)


class Infer(Feature):
    """A plan for an architecture without one, from a small model of it."""

    requires = ("architectures", "command_line", "mixers", "refusals", "verify")
    commands = {"suggest": ".command"}

    def planners(self) -> Mapping[str, Planner]:
        return {"infer": Planner(_infer, ADVICE)}


def _infer(model: PreTrainedModel, size: int) -> Mapping[str, Any]:
    from .suggestion import infer

    return infer(model, size)


FEATURE = Infer()
