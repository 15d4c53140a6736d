"""Messages of a rank that failed alone, beside the collectives that the others wait in.

    rank 1 raises in a forward ─ its report ─> store <─ polled ─ a thread of every rank
      all ranks report, after as many collectives: they failed alike; each raises its own error, and may go on
      some have not after GRACE seconds: all end their process group, and raise rank 1's error

The store is that of the ranks' rendezvous. A thread of every process polls it, and leaves a sign of life there; nothing
is added to a healthy collective. Each rank hears the next one: where that is silent for `limit` seconds, it tells all.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from time import monotonic
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import RemoteRankError, error_text
from ..logs import get_logger
from ..marks import untyped
from . import direct
from .failure import FAILURE, GRACE, Failure, Report, follows, is_alike, judge, left, lost
from .group import TensorParallelGroup, bind_thread, is_agreed
from .poller import BEAT, POLLER
from .shared_memory.joining import memory_of
from .sockets import between, connections, shut, store_of_ranks
from .waits import Waits, beat_of

logger = get_logger(__name__)

LIMIT = 10.0
"""Seconds without a sign of life after which a rank counts as lost, unless a load says otherwise."""
TRACE = 6000
"""Characters of a traceback that other ranks are told."""
LEFT = -(1 << 40)
"""Added to a rank's signs of life when its model is gone."""


class Watch:
    """The ranks of one model; each hears when another one fails or is lost.

    `with watch:` surrounds a call that all ranks make; it may be nested. If the call fails on some ranks and not on
    others, all raise, and every later call raises RemoteRankError at once.
    """

    failure: Failure | None
    """The reason for the end of the process group; None while it lives."""
    process_group: Any
    """The ranks' process group, which stays known where it has been destroyed."""
    number: int
    """The same on all ranks, and another one for each watch and each process group."""

    def __init__(self, group: TensorParallelGroup, limit: float = LIMIT, *, is_of_copies: bool = False) -> None:
        """Begin to watch; all ranks of `group`, of two or more, have to call it.

        Args:
            limit: seconds until a silent rank counts as lost.
            is_of_copies: whether the ranks hold the same part of several copies of a model, which are not in step.
        """
        self.group, self.limit, self.is_of_copies = group, limit, is_of_copies
        self.beyond: Watch | None = None
        """The watch of this process over the copies, which surrounds every call of this one."""
        self.owes_backward = False
        """True from a forward that autograd recorded until a backward has ended."""
        self._depth, self._entered, self._entered_at = 0, 0, 0.0
        self.begin()

    def begin(self) -> None:
        """Begin with a process group, the model's first one or a new one; all ranks have to call it."""
        store, rank = store_of_ranks(), self.group.rank
        assert store is not None
        own = connections(store)
        number = store.add("tp_transformers/watches", 1) if rank == 0 else 0
        ranks = self.group.gather((number, list(own.values())))
        self._links = between(own, [ends for each, (_, found) in enumerate(ranks) if each != rank for ends in found])
        self.number = ranks[0][0]
        self._store = PrefixStore(f"tp_transformers/watch {self.number}", store)
        self.process_group = untyped(self.group.process_group)
        self._error: Exception | None = None
        self._began: tuple[float, list[int]] | None = None
        self._round, self._settled = 0, threading.Event()
        self._heard, self._heard_at, self._polled_at = 0, monotonic(), monotonic()
        self._unreachable_at: float | None = None
        self._waits = Waits(self.group, self._store)
        self.failure = None  # from here on it is polled
        POLLER.add(self, partial(_leave, self._store, rank))

    @property
    def meeting(self) -> Store:
        """A store for the ranks to meet once more."""
        return PrefixStore("a new process group", self._store)

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return self

    # In the thread that calls the model.

    def __enter__(self) -> Watch:
        if not self._depth:
            self.check()
            if self.beyond is not None:
                self.beyond.__enter__()
            self._entered, self._entered_at = self._collectives(), monotonic()
        self._depth += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            if error is None:
                self.check()  # collectives of NCCL return when they are aborted
            elif isinstance(error, Exception):
                self.tell(error)
        except RemoteRankError as remote:
            error = remote
            raise
        finally:
            if self.beyond is not None:
                self.beyond.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raise RemoteRankError if the process group has ended."""
        if self.failure is not None:
            raise self.failure.to_error()

    def tell(self, error: Exception) -> None:
        """Make `error` known to all ranks, and wait until it is known whether all have failed alike.

        Raises RemoteRankError from `error` where another rank failed first.
        """
        if is_agreed(error) and not follows(error):
            return
        if self.failure is None:
            self._settled.clear()
            self._error = error
            POLLER.soon()
            self._settled.wait(max(self.limit, 3 * GRACE))
        if self._unreachable_at is not None and not follows(error):
            return  # nobody can be told
        if self.failure is not None:
            if self.failure.is_of_all or self.failure.rank != self.group.global_ranks[self.group.rank]:
                raise self.failure.to_error() from error
            if FAILURE.find(error) is None:
                FAILURE.put(error, self.failure)
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note("All ranks have been told; their process group has ended.")

    def _collectives(self) -> int:
        """How many collectives this rank has begun."""
        return direct.begun(self.process_group, self.group.device)

    # In the thread that polls.

    @property
    def is_urgent(self) -> bool:
        """True while ranks find out which of them have failed."""
        return self.failure is None and (self._error is not None or self._began is not None)

    def poll(self) -> None:
        """Give a sign of life, publish an error, and look for those of others."""
        if self.failure is not None:
            return
        now = monotonic()
        if self._unreachable_at is None:
            try:
                self._ask(now)
            except RuntimeError as error:
                logger.debug("the store at which the ranks met is gone: %s", error)
                self._unreachable_at = now
        if self._unreachable_at is not None:  # torch warns of each try
            waits = self._depth and now - max(self._entered_at, self._unreachable_at) > self.limit
            if self.is_urgent or waits:
                text = "or the launcher has ended: the store at which the ranks met cannot be reached"
                self._conclude(Failure(0, text, is_lost=True))
        self._polled_at = now

    def _ask(self, now: float) -> None:
        self._store.add(beat_of(self.group.rank), 1)
        if self._error is not None:
            self._publish(self._error)
            self._error = None
        if self._store.add(f"reports {self._round}", 0):
            self._settle(now)
        else:
            self._hear(now)
            first = next(iter(watches(self.process_group)), None)  # of several models of these ranks, one tells
            stuck = self._waits.look(now, self._collectives()) if first is self and not self.is_of_copies else None
            if stuck is not None:
                self._end(stuck)

    def _publish(self, error: Exception) -> None:
        known = FAILURE.find(error)
        if known is not None:  # of the ranks of another watch
            self._rule(known)
        memory = memory_of(self.process_group)
        report = Report(
            order=self._store.add(f"order {self._round}", 1),
            collectives=self._collectives() - self._entered,
            error=error_text(error),
            trace="".join(traceback.format_exception(error))[-TRACE:],
            follows=follows(error),
            is_last=memory is not None and bool(memory.ended),
        )
        self._store.set(f"report {self._round} {self.group.rank}", json.dumps(asdict(report)))
        self._store.add(f"reports {self._round}", 1)

    def _settle(self, now: float) -> None:
        """Find the verdict of the ranks, or give it."""
        verdict = f"verdict {self._round}"
        if not self._store.check([verdict]):
            if self._began is None:
                self._began = now, self._beats()
            reports = self._reports()
            failure = None
            if not is_alike(reports, self.group.size):
                failure = judge(reports, self._began[1], self._beats(), now - self._began[0], self.group.global_ranks)
                if failure is None:
                    return
            self._rule(failure)
        found = json.loads(self._store.get(verdict))
        self._conclude(Failure(**found) if found is not None else None)

    def _rule(self, failure: Failure | None) -> None:
        """Give the verdict, unless another rank has; None where all failed alike."""
        self._store.compare_set(f"verdict {self._round}", "", json.dumps(failure and asdict(failure)))

    def _end(self, failure: Failure) -> None:
        """Give a verdict that no report asks for."""
        self._rule(failure)
        self._store.add(f"reports {self._round}", 1)

    def _hear(self, now: float) -> None:
        """Hear the next rank; tell all if it has been silent for too long."""
        other = (self.group.rank + 1) % self.group.size
        beat = self._store.add(beat_of(other), 0)
        if beat != self._heard or now - self._polled_at > 4 * BEAT:  # this process may have been stopped itself
            self._heard, self._heard_at = beat, now
        has_left = beat < 0  # others may finish later: it is missed where one waits for it
        since = max(self._heard_at, self._entered_at) if has_left else self._heard_at
        if now - since > self.limit and (self._depth or not has_left):
            rank = self.group.global_ranks[other]
            self._end(left(rank) if has_left else lost(rank, now - since))

    def _beats(self) -> list[int]:
        return [self._store.add(beat_of(rank), 0) for rank in range(self.group.size)]

    def _reports(self) -> dict[int, Report]:
        keys = {rank: f"report {self._round} {rank}" for rank in range(self.group.size)}
        return {
            rank: Report(**json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])
        }

    def _conclude(self, failure: Failure | None) -> None:
        """Go on where all failed alike; else end the process group, for all models of these ranks."""
        self._round, self._began = self._round + 1, None
        if failure is not None:
            bind_thread(self.group.device)
            for other in watches(self.process_group):
                other.failure = failure
                other._settled.set()
            memory = memory_of(self.process_group)
            if memory is not None:
                memory.end("the ranks' process group has ended")
            shut(self._links)
            with suppress(RuntimeError):
                self.process_group.abort()
        self._settled.set()


def watches(process_group: Any) -> list[Watch]:
    """The watches of this process over the ranks of `process_group`."""
    return [each for each in POLLER.all() if isinstance(each, Watch) and each.process_group == process_group]


def watched(found: Iterable[Watch]) -> ExitStack:
    """The watches, entered."""
    with ExitStack() as stack:  # which leaves the first again, if the second raises
        for each in found:
            stack.enter_context(each)
        return stack.pop_all()


def watched_ranks(group: TensorParallelGroup) -> ExitStack:
    """The watches of the models of these ranks, entered; none without a process group, or where it was destroyed."""
    try:
        process_group = group.process_group
    except RuntimeError:
        return ExitStack()
    return watched(watches(process_group))


def _leave(store: Store, rank: int) -> None:
    with suppress(RuntimeError):  # the store may have ended with the rank that keeps it
        store.add(beat_of(rank), LEFT)
