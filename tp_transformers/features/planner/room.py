"""Judgement of a planned load: whether each rank has room for it, and what would fit if not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...errors import size
from ..command_line.models import most_tokens
from .fit import fullest, longest_context, more_ranks, refit, smallest_size
from .memory import MemoryPlan, replan
from .survey import Survey


@dataclass(frozen=True)
class Room:
    """The memory of the ranks, held against what a load needs."""

    memory: tuple[int, ...]
    """Bytes of each rank."""
    fits: bool
    smallest: int | None
    """The smallest number of ranks that fits, if all have the same memory."""
    context: int | None
    """The most tokens of a sequence that fit with these shares, up to the model's own; None if not even one does."""
    remedies: tuple[str, ...] = ()
    """Changes with which it would fit, if it does not."""

    @property
    def is_even(self) -> bool:
        """True if all ranks have the same memory."""
        return len(set(self.memory)) == 1


def judge(planned: MemoryPlan, memory: Sequence[int], packed: Callable[[], Survey] | None, *, is_fitted: bool) -> Room:
    """Hold `planned` against the `memory` of each rank.

    `packed`: surveys the load with packed weights; None if that is no other load. `is_fitted`: whether the shares were
    found for this memory.
    """
    fits = fullest(planned, memory) <= 1
    smallest = smallest_size(planned, memory[0]) if len(set(memory)) == 1 else None
    context = longest_context(planned, memory)
    remedies = () if fits else tuple(_remedies(planned, memory, packed, is_fitted, context))
    return Room(tuple(memory), fits, smallest, context, remedies)


def _remedies(
    planned: MemoryPlan,
    memory: Sequence[int],
    packed: Callable[[], Survey] | None,
    is_fitted: bool,
    context: int | None,
) -> list[str]:
    found = []
    most = most_tokens(planned.survey.model.config) or planned.context
    if planned.context > most:  # no memory helps
        planned = replan(planned, context=most)
        if fullest(planned, memory) <= 1:
            return [f"--context {most}, the most that the model takes"]
    other = None if is_fitted else refit(planned, memory)
    if other is not None and fullest(other, memory) <= 1:
        return [f"--shares {','.join(map(str, other.survey.plan.numbers or ()))}"]
    if context:
        found.append(f"--context {context}, with the same shares")
    if packed is not None and fullest(refit(replace(planned, survey=packed()), memory), memory) <= 1:
        found.append("--packed: quantised weights stay as they are stored")
    count = more_ranks(planned, memory) if len(set(memory)) > 1 else None
    if count:
        found.append(f"{count} more rank{'s' * (count > 1)} of {size(min(memory))}")
    return found
