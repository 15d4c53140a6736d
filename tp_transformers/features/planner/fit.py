"""Judgement of a planned load: whether it fits into given memory, and which shares, ranks or context would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import PlanError, size
from ..command_line.models import most_tokens
from .memory import MemoryPlan, plan_memory, replan
from .survey import Survey

MOST_RANKS = 64
"""Largest number of ranks that `smallest_size` tries."""

ROUNDS = 6
"""Largest number of shares that `fit_shares` tries."""

MOVES = (80, 20, 5, 1)
"""Units that are moved between ranks at the end, to correct what complete heads and experts left uneven."""

RESOLUTION = 1000
"""`fit_shares` finds shares in units of 1 / RESOLUTION."""


def smallest_size(planned: MemoryPlan, memory: int) -> int | None:
    """Find the smallest number of ranks that hold at most `memory` bytes each; None if MOST_RANKS are too few.

    Args:
        planned: the plan for any number of ranks.
        memory: bytes of a rank.
    """
    room = memory - planned.buffer_bytes
    if room <= 0:
        return None
    total = sum(parameter.nbytes for parameter in planned.parameters)
    for count in range(max(1, -(-total // room)), MOST_RANKS + 1):  # fewer ranks cannot hold the parameters
        try:
            tried = replan(planned, survey=planned.survey.with_shares(None), size=count)
        except PlanError:  # some plans fit only some numbers of ranks
            continue
        if max(tried.total_bytes) <= memory:
            return count
    return None


def fit_shares(survey: Survey, memory: Sequence[int], **options: Any) -> MemoryPlan:
    """Find shares with which ranks of unlike memory fill equal fractions of it.

    Every rank holds what is replicated; that comes off its memory before its share. Heads and experts are not divided,
    so shares are corrected by the bytes that they lead to, up to ROUNDS times; the best are returned.

    Args:
        survey: the model, its plan and its checkpoint.
        memory: bytes of each rank.
        options: arguments of `plan_memory`.

    Raises:
        PlanError: if the plan does not fit the model, or replicates most of it.
    """
    best: MemoryPlan | None = None
    shares, tried_shares = [1.0] * len(memory), set[tuple[int, ...]]()
    for _ in range(ROUNDS):
        rounded = tuple(max(1, round(RESOLUTION * share / sum(shares))) for share in shares)
        if rounded in tried_shares:
            break
        tried_shares.add(rounded)
        tried = plan_memory(survey.with_shares(rounded), len(memory), **options)
        if best is None or fullest(tried, memory) < fullest(best, memory):
            best = tried
        level, fixed = sum(tried.total_bytes) / sum(memory), tried.replicated_bytes
        shares = [
            share * max(level * room - fixed, 0.0) / max(held - fixed, 1)
            for share, room, held in zip(rounded, memory, tried.total_bytes, strict=True)
        ]
    assert best is not None
    for moved in MOVES:
        best = _improved(best, memory, moved)
    return best


def refit(planned: MemoryPlan, memory: Sequence[int]) -> MemoryPlan:
    """Find shares for ranks of this `memory`, for the batch, context and options of `planned`; see `fit_shares`."""
    return fit_shares(planned.survey, memory, **planned.options)


def _improved(planned: MemoryPlan, memory: Sequence[int], moved: int) -> MemoryPlan:
    """Move `moved` parts of the shares from the fullest rank to the emptiest while that helps."""
    while True:
        shares = list(planned.survey.plan.shares or ())
        filled = [held / room for held, room in zip(planned.total_bytes, memory, strict=True)]
        first, last = filled.index(max(filled)), filled.index(min(filled))
        if shares[first] <= moved or first == last:
            return planned
        shares[first] -= moved
        shares[last] += moved
        tried = replan(planned, survey=planned.survey.with_shares(tuple(shares)))
        if fullest(tried, memory) >= fullest(planned, memory):
            return planned
        planned = tried


def fullest(planned: MemoryPlan, memory: Sequence[int]) -> float:
    """Bytes of the rank that fills most of its memory, as a fraction of that."""
    return max(held / room for held, room in zip(planned.total_bytes, memory, strict=True))


def longest_context(planned: MemoryPlan, memory: Sequence[int]) -> int | None:
    """The longest context that fits with the same shares; None if none of one token fits.

    It is no longer than the model's own; where the config does not say that, than the planned one.
    """
    low, high = 0, (most_tokens(planned.survey.model.config) or planned.context) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fullest(replan(planned, context=middle), memory) <= 1 else (low, middle)
    return low or None


def more_ranks(planned: MemoryPlan, memory: Sequence[int]) -> int | None:
    """The number of further ranks with the smallest memory that make it fit; None if MOST_RANKS are too few."""
    for count in range(1, MOST_RANKS - len(memory) + 1):
        room = [*memory, *[min(memory)] * count]
        if planned.replicated_bytes >= min(room):
            return None
        if sum(planned.total_bytes) <= sum(room) + planned.replicated_bytes:  # fewer cannot hold it
            try:
                tried = refit(planned, room)
            except PlanError:  # some plans fit only some numbers of ranks
                continue
            if fullest(tried, room) <= 1:
                return count
    return None


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
        return [f"--shares {','.join(map(str, other.survey.plan.shares or ()))}"]
    if context:
        found.append(f"--context {context}, with the same shares")
    if packed is not None and fullest(refit(replace(planned, survey=packed()), memory), memory) <= 1:
        found.append("--packed: quantised weights stay as they are stored")
    count = more_ranks(planned, memory) if len(set(memory)) > 1 else None
    if count:
        found.append(f"{count} more rank{'s' * (count > 1)} of {size(min(memory))}")
    return found
