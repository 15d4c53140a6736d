"""Verification of a suggested plan. Blocks that `verify` finds wrong are replicated; the plan has the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from ...errors import TensorParallelError
from ..verify.verify import Verdict, verify
from .suggestion import Suggestion

TRIES = 4
"""Number of tries, each with one block less, after a plan is found wrong; then everything is replicated."""


def prove(
    suggestion: Suggestion,
    config: PretrainedConfig,
    size: int,
    *,
    check: Callable[..., list[Verdict]] = verify,
    log: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> tuple[Suggestion, Verdict]:
    """Verify a suggestion; returns the suggestion that passes, and its verdict.

    Blocks that a verdict names are replicated one by one; after TRIES blocks, everything is.

    Args:
        check: a function with the signature of `verify`.
        log: called with a line about each step, and about every failed try.
        options: other arguments of `check`.
    """
    for tried in range(TRIES + 1):
        try:
            verdict = check(config, plan=suggestion.plan, sizes=(size,), grads=True, log=log, **options)[0]
        except TensorParallelError as error:
            if not suggestion.blocks:
                raise
            verdict = Verdict(size, (str(error),))
        if verdict.ok or not suggestion.blocks:
            break
        fault = verdict.faults[0].splitlines()[0]
        for suspect in suggestion.suspects("\n".join(verdict.faults))[: 1 if tried < TRIES - 1 else None]:
            log(f"{suspect.kind} {suspect.name} stays replicated: {fault}")
            suggestion = suggestion.without(suspect, f"verify found it wrong when sharded: {fault}")
    return suggestion, verdict
