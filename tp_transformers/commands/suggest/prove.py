"""The proof of a suggested plan, by `verify`. Blocks that `verify` finds wrong are replicated; the plan says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from ...errors import TensorParallelError
from ...plan_search.suggestion import Suggestion
from ..verify.verify import Verdict, verify

TRIES = 4
"""Number of tries with one block less after a plan is found wrong; then everything is replicated."""


def prove(
    suggestion: Suggestion,
    config: PretrainedConfig,
    size: int,
    *,
    check: Callable[..., list[Verdict]] = verify,
    tell: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> tuple[Suggestion, Verdict]:
    """A suggestion that verify proves, and its verdict.

    Blocks that a verdict names are replicated one by one; after TRIES of them everything is.

    Args:
        check: a function like `verify`.
        tell: called with a line about each step, and about every try that failed.
        options: others of `check`.
    """
    for tried in range(TRIES + 1):
        try:
            verdict = check(config, plan=suggestion.plan, sizes=(size,), grads=True, tell=tell, **options)[0]
        except TensorParallelError as error:
            if not suggestion.blocks:
                raise
            verdict = Verdict(size, (str(error),))
        if verdict.ok or not suggestion.blocks:
            break
        fault = verdict.faults[0].splitlines()[0]
        for suspect in suggestion.suspects("\n".join(verdict.faults))[: 1 if tried < TRIES - 1 else None]:
            tell(f"{suspect.kind} {suspect.name} stays whole: {fault}")
            suggestion = suggestion.without(suspect, f"verify found it wrong when cut: {fault}")
    return suggestion, verdict
