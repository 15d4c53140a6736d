"""The rank that failed first, determined from the reports and heartbeats of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ...errors import RemoteRankError, error_text
from ...marks import Mark
from ...ranks.group import is_agreed

GRACE = 3.0
"""Seconds after the first report in which the other ranks may report a failure too."""


@dataclass(frozen=True)
class Report:
    order: int
    """Position of the rank in the order of reports."""
    collectives: int
    """Number of collectives that it has begun since it entered the call that failed."""
    error: str
    """ "ErrorType: message"."""
    trace: str
    """The traceback."""
    follows: bool
    """True if the error is a consequence: another rank, which failed first, could not be reached."""
    is_last: bool = False
    """True if this rank cannot make further collectives."""


@dataclass(frozen=True)
class Failure:
    """The reason why a model's process group was ended."""

    rank: int
    """Global rank of the rank that failed first."""
    text: str
    """A clause for the message: "failed with ValueError: ..."."""
    trace: str = ""
    """Its traceback."""
    is_lost: bool = False
    """True if the rank sends no heartbeats."""
    is_of_all: bool = False
    """True if no rank failed, but all wait in different calls: every rank raises the error."""

    def to_error(self) -> RemoteRankError:
        """The error that the other ranks raise, with the same message on each."""
        advice = "Call tp_transformers.renew_process_group(model) on all ranks to go on, or end them."
        trace = f"\n\nTraceback of rank {self.rank}:\n{self.trace}" if self.trace else ""
        error = RemoteRankError(
            f"rank {self.rank} {self.text.rstrip('.')}. The ranks' process group has been ended, since the others "
            f"would have waited for it. {'Start all ranks again.' if self.is_lost else advice}{trace}"
        )
        FAILURE.put(error, self)
        return error


FAILURE: Mark[Failure] = Mark("_failure")
"""The failure, on an error that ranks other than the failed one raise."""


def lost(rank: int, seconds: float) -> Failure:
    """The failure of a rank without heartbeats."""
    text = f"gave no sign of life for {seconds:.0f} s: it was killed or stopped, or its machine cannot be reached"
    return Failure(rank, text, is_lost=True)


def left(rank: int) -> Failure:
    """The failure of a rank that exited normally, while others wait for it."""
    text = (
        "has ended, or no longer holds the model, while others wait for it in a call that it has not made: "
        "all ranks of a model have to make the same calls"
    )
    return Failure(rank, text, is_lost=True)


def is_identical(reports: Mapping[int, Report], size: int) -> bool:
    """True if all `size` ranks failed after equally many collectives: none waits for another, so all can go on."""
    counts = {report.collectives for report in reports.values()}
    return len(reports) == size and len(counts) == 1 and not any(report.is_last for report in reports.values())


def judge(
    reports: Mapping[int, Report], before: Sequence[int], now: Sequence[int], seconds: float, ranks: Sequence[int]
) -> Failure | None:
    """The failure that all ranks raise; None while undecided.

    Args:
        reports: the report of each rank that failed, by group rank; at least one.
        before: heartbeat counter of each rank when the first report was seen; below 0 once a rank has left.
        now: the heartbeat counters `seconds` later.
        seconds: time since the first report was seen.
        ranks: the global ranks of the group.
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
    elif silent and seconds < 2 * GRACE:  # on a busy machine they may be late, and may fail too
        return None
    return Failure(ranks[first], f"failed with {reports[first].error}", reports[first].trace)


def follows(error: BaseException) -> bool:
    """True if `error` comes from a collective or vote that failed because another rank was missing."""
    if is_agreed(error):
        return error.__cause__ is not None and follows(error.__cause__)
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(backend in error_text(error) for backend in ("gloo", "NCCL"))
    )
