"""The rank that failed first, judged from the reports of the ranks and their signs of life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ..errors import RemoteRankError, error_text
from ..marks import Mark
from .group import is_agreed

GRACE = 3.0
"""Seconds that the ranks have to fail alike, once one has failed."""


@dataclass(frozen=True)
class Report:
    """The report of a rank that failed."""

    order: int
    """Its place among the ranks that failed."""
    collectives: int
    """How many it has begun since it entered the call that failed."""
    error: str
    """ "ErrorType: message"."""
    trace: str
    """The traceback."""
    follows: bool
    """True if the error says that another rank cannot be reached: that one failed first."""
    is_last: bool = False
    """True if this rank can make no collective any more."""


@dataclass(frozen=True)
class Failure:
    """Why a model's process group has ended."""

    rank: int
    """The rank that failed first, of all that were started."""
    text: str
    """A clause about it: "failed with ValueError: ..."."""
    trace: str = ""
    """Its traceback."""
    is_lost: bool = False
    """True if the rank gives no sign of life."""
    is_of_all: bool = False
    """True if no rank failed, but they wait in different calls: all ranks raise it, this one too."""

    def to_error(self) -> RemoteRankError:
        """The error of all other ranks, with the same message."""
        advice = "Call tp_transformers.renew_process_group(model) on all ranks to go on, or end them."
        trace = f"\n\nTraceback of rank {self.rank}:\n{self.trace}" if self.trace else ""
        error = RemoteRankError(
            f"rank {self.rank} {self.text.rstrip('.')}. The ranks' process group has been ended, since the others "
            f"would have waited for it. {'Start all ranks again.' if self.is_lost else advice}{trace}"
        )
        FAILURE.put(error, self)
        return error


FAILURE: Mark[Failure] = Mark("_failure")
"""Why the error was raised, on an error that others than the rank that failed raise."""


def lost(rank: int, seconds: float) -> Failure:
    """The failure of a rank that is silent."""
    text = f"gave no sign of life for {seconds:.0f} s: it was killed or stopped, or its machine cannot be reached"
    return Failure(rank, text, is_lost=True)


def left(rank: int) -> Failure:
    """The failure of a rank that has ended as it should, while others wait for it."""
    text = (
        "has ended, or no longer holds the model, while others wait for it in a call that it has not made: "
        "all ranks of a model have to make the same calls"
    )
    return Failure(rank, text, is_lost=True)


def is_alike(reports: Mapping[int, Report], size: int) -> bool:
    """True if all `size` ranks failed after as many collectives, so that none waits for another, and can go on."""
    counts = {report.collectives for report in reports.values()}
    return len(reports) == size and len(counts) == 1 and not any(report.is_last for report in reports.values())


def judge(
    reports: Mapping[int, Report], before: Sequence[int], now: Sequence[int], seconds: float, ranks: Sequence[int]
) -> Failure | None:
    """The failure that all ranks raise; None as long as it is not known.

    Args:
        reports: the report of each rank that failed, by its place in the group; at least one.
        before: each rank's signs of life when the first report was seen, a number that grows; below 0 once it left.
        now: the same `seconds` later.
        seconds: those that have passed.
        ranks: of the group, as they are numbered among all that were started.
    """
    if seconds < GRACE and len(reports) < len(now):
        return None
    first = min(reports, key=lambda rank: (reports[rank].follows, reports[rank].order))
    silent = [rank for rank, beat in enumerate(now) if beat == before[rank] and rank not in reports]
    if reports[first].follows:
        if silent and seconds >= GRACE:
            return left(ranks[silent[0]]) if now[silent[0]] < 0 else lost(ranks[silent[0]], seconds)
        if seconds < 1.5 * GRACE:
            return None
    elif silent and seconds < 2 * GRACE:  # a busy machine may not have run them; they may fail, too
        return None
    return Failure(ranks[first], f"failed with {reports[first].error}", reports[first].trace)


def follows(error: BaseException) -> bool:
    """True if `error` is of a collective, or of a vote, that another rank was missing from."""
    if is_agreed(error):
        return error.__cause__ is not None and follows(error.__cause__)
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(each in error_text(error) for each in ("gloo", "NCCL"))
    )
