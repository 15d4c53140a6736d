"""Failure detection outside of collectives: the other ranks learn of a failed or lost rank through a store.

    rank 1 raises in a forward ─ its report ─> store <─ polled ─ a thread of every rank
      all ranks report, after equally many collectives: each raises its own error, and may go on
      some have not reported after GRACE seconds: all end their process group, and raise rank 1's error

The store is the rendezvous store. A thread of each process polls it, and increments a heartbeat counter there; a
healthy collective costs nothing more. Each rank monitors the next one, and reports it after `limit` seconds without a
heartbeat.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...errors import RemoteRankError, error_text
from ...logs import get_logger
from ...marks import untyped
from ...ranks import direct
from ...ranks.direct import transport_of
from ...ranks.group import TensorParallelGroup, agreed, is_agreed
from ..places.place import out_of_step, this_call
from .device import Steps, abort
from .failure import FAILURE, GRACE, Failure, Report, follows, is_identical, judge, left, lost
from .poller import BEAT, POLLER
from .process import this_process
from .sockets import between, connections, limit_silence, shut, store_of_ranks
from .waits import Waits, beat_of

logger = get_logger(__name__)

LIMIT = 10.0
"""Default seconds without a heartbeat until a rank counts as lost."""
BUSY = 6
"""Times as long for a process that runs on this machine: it may swap, or hold the GIL while it compiles or imports."""
TRACE = 6000
"""Characters of a traceback to send to other ranks."""
LEFT = -(1 << 40)
"""Added to a rank's heartbeat counter when its model is deleted."""


class Watch:
    """Watches the ranks of one model for failed and lost ranks.

    Use `with watch:` around a call that all ranks make; it may be nested. If the call fails on some ranks only, all
    raise, and every later call raises RemoteRankError immediately.
    """

    failure: Failure | None
    """The reason for the end of the process group; None while it is running."""
    process_group: Any
    """The ranks' process group; the reference is kept after it was destroyed."""
    number: int
    """Identifies the watch and its process group; the same on all ranks."""

    def __init__(self, group: TensorParallelGroup, limit: float = LIMIT, *, is_of_copies: bool = False) -> None:
        """Begin to watch. Collective over `group`, which has at least two ranks.

        Args:
            limit: seconds without a heartbeat until a rank counts as lost.
            is_of_copies: True if the ranks hold the same shard in several copies of a model, which run asynchronously.
        """
        self.group, self.limit, self.is_of_copies = group, limit, is_of_copies
        self.beyond: Watch | None = None
        """This process' watch over the copies, entered around every call of this watch."""
        self.owes_backward = False
        """True between a forward that autograd recorded and the end of its backward, or the first error after it: a
        later backward is another model's."""
        self._depth, self._entered, self._entered_at = 0, 0, 0.0
        self.steps = Steps(group.device)
        self.begin()

    def begin(self) -> None:
        """Watch a process group: the model's first one or a renewed one. Collective."""
        store, rank = store_of_ranks(), self.group.rank
        assert store is not None
        limit_silence(store, self.limit)
        own = connections(store)
        number = store.add("tp_transformers/watches", 1) if rank == 0 else 0
        ranks = self.group.gather((number, list(own.values()), this_process()))
        self._links = between(
            own, [ends for peer, (_, peer_ends, _) in enumerate(ranks) if peer != rank for ends in peer_ends]
        )
        self._next = ranks[(rank + 1) % len(ranks)][2]
        self.number = ranks[0][0]
        self._store = PrefixStore(f"tp_transformers/watch {self.number}", store)
        self.process_group = untyped(self.group.process_group)
        self._error: Exception | None = None
        self._began: tuple[float, list[int]] | None = None
        self._round, self._concluded = 0, threading.Event()
        self._heard, self._heard_at, self._polled_at = 0, monotonic(), monotonic()
        self._unreachable_at: float | None = None
        self._waits = Waits(self.group, self._store, is_of_copies=self.is_of_copies)
        is_noticed = transport_of(self.process_group).notices
        self._is_unnoticed = self.group.device.type == "cpu" and not is_noticed
        self.steps.is_aborted.clear()
        self.failure = None  # polled from here on
        POLLER.add(self, partial(_leave, self._store, rank))

    @property
    def meeting(self) -> Store:
        """A store for the rendezvous of a new process group."""
        return PrefixStore("a new process group", self._store)

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return self

    # Called in the thread that calls the model.

    def __enter__(self) -> Watch:
        if not self._depth:
            self.check()
            if self.beyond is not None:
                self.beyond.__enter__()
            self._entered, self._entered_at = self._collectives(), monotonic()
            self.steps.running = 0  # those that have not ended have raised, on all ranks alike
            transport_of(self.process_group).enter()
        self._depth += 1
        return self

    @property
    def compares_calls(self) -> bool:
        """True in an outermost call whose collectives would not notice that ranks are out of step."""
        return self._depth == 1 and self._is_unnoticed

    def compare_calls(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise MeshError, on all ranks, if the tensors of an outermost call differ in shape or dtype.

        Collectives of gloo would end the process of a rank that receives more than it expects.
        """
        direct.refuse_transforms()  # before ranks exchange anything
        named = [*enumerate(args), *kwargs.items()]
        shapes = [(name, value.shape, value.dtype) for name, value in named if isinstance(value, Tensor)]
        everyone = self.group.gather((shapes, torch.is_autocast_enabled("cpu")))
        if any(peer != everyone[0] for peer in everyone):
            raise agreed(out_of_step(self.group.gather(this_call())))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        transport_of(self.process_group).leave()
        try:
            if error is None:
                self.check()  # an aborted NCCL collective returns without an error
            elif isinstance(error, Exception):
                self.report(error)
        except RemoteRankError as remote:
            error = remote
            raise
        finally:
            if error is not None:
                self.owes_backward = False
            if self.beyond is not None:
                self.beyond.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raise RemoteRankError if the process group has ended."""
        if self.failure is not None:
            self.owes_backward = False
            raise self.failure.to_error()

    def report(self, error: Exception) -> None:
        """Report `error` to all ranks, and wait for the verdict: did all ranks fail, or did another one fail first?

        Raises RemoteRankError from `error` if another rank failed first.
        """
        if is_agreed(error) and not follows(error):
            return
        if self.failure is None:
            self._concluded.clear()
            self._error = error
            POLLER.soon()
            self._concluded.wait(max(self.limit, 3 * GRACE))
        if self._unreachable_at is not None and not follows(error):
            return  # the store is unreachable
        if self.failure is not None:
            if self.failure.is_of_all or self.failure.rank != self.group.global_ranks[self.group.rank]:
                raise self.failure.to_error() from error
            if FAILURE.find(error) is None:
                FAILURE.put(error, self.failure)
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note("The failure was reported to all ranks; their process group has ended.")

    def _collectives(self) -> int:
        """Number of collectives that this rank has begun."""
        backend = untyped(self.process_group._get_backend(self.group.device))
        return int(backend._get_sequence_number_for_group()) + transport_of(self.process_group).collectives

    # Called in the polling thread.

    @property
    def is_urgent(self) -> bool:
        """True while the verdict on an error is pending."""
        return self.failure is None and (self._error is not None or self._began is not None)

    def poll(self) -> None:
        """Send a heartbeat, publish this rank's error, and look for errors of other ranks."""
        if self.failure is not None:
            return
        now = monotonic()
        if self._unreachable_at is None:
            try:
                self._ask(now)
            except RuntimeError as error:
                logger.debug("the store at which the ranks met is gone: %s", error)
                self._unreachable_at = now
        if self._unreachable_at is not None:  # no further attempts: torch warns of each
            waits = self._depth and now - max(self._entered_at, self._unreachable_at) > self.limit
            if self.is_urgent or waits:
                text = "or the launcher has ended: the store at which the ranks met cannot be reached"
                self.conclude(Failure(0, text, is_lost=True))
        self._polled_at = now

    def _ask(self, now: float) -> None:
        self._store.add(beat_of(self.group.rank), 1)
        if self._error is not None:
            self._publish(self._error)
            self._error = None
        if self._store.add(f"reports {self._round}", 0):
            self._decide(now)
        else:
            self._check_next(now)
            first = next(iter(watches(self.process_group)), None)  # of several models on these ranks, one warns
            stuck = self._waits.look(now, self._collectives()) if first is self else None
            if stuck is not None:
                self._end(stuck)

    def _publish(self, error: Exception) -> None:
        failure = FAILURE.find(error)
        if failure is not None:  # from another watch
            self._rule(failure)
        report = Report(
            order=self._store.add(f"order {self._round}", 1),
            collectives=self._collectives() - self._entered,
            error=error_text(error),
            trace="".join(traceback.format_exception(error))[-TRACE:],
            follows=follows(error),
            is_last=bool(transport_of(self.process_group).ended),
        )
        self._store.set(f"report {self._round} {self.group.rank}", json.dumps(asdict(report)))
        self._store.add(f"reports {self._round}", 1)

    def _decide(self, now: float) -> None:
        """Read the verdict on the reports, or decide it."""
        verdict = f"verdict {self._round}"
        if not self._store.check([verdict]):
            self._began = self._began or (now, self._beats())
            reports = self._reports()
            failure = None
            if not is_identical(reports, self.group.size):
                failure = judge(reports, self._began[1], self._beats(), now - self._began[0], self.group.global_ranks)
                if failure is None:
                    return
            self._rule(failure)
        decided = json.loads(self._store.get(verdict))
        self.conclude(Failure(**decided) if decided is not None else None)

    def _rule(self, failure: Failure | None) -> None:
        """Publish a verdict unless another rank has done so; None if all ranks failed by themselves."""
        self._store.compare_set(f"verdict {self._round}", "", json.dumps(failure and asdict(failure)))

    def _end(self, failure: Failure) -> None:
        """Publish a verdict without a report."""
        self._rule(failure)
        self._store.add(f"reports {self._round}", 1)

    def _check_next(self, now: float) -> None:
        """Check the heartbeat of the next rank; end the process group if it has been missing for too long."""
        next_rank = (self.group.rank + 1) % self.group.size
        beat = self._store.add(beat_of(next_rank), 0)
        if beat != self._heard or now - self._polled_at > 4 * BEAT:  # this process itself may have been stopped
            self._heard, self._heard_at = beat, now
        has_left = beat < 0  # a fault only if this rank waits for it: ranks may finish at different times
        since = max(self._heard_at, self._entered_at) if has_left else self._heard_at
        if now - since <= self.limit or (has_left and not self._depth):
            return
        rank = self.group.global_ranks[next_rank]
        if has_left:
            self._end(left(rank))
        elif now - since > BUSY * self.limit or not self._next.runs:
            self._end(lost(rank, now - since))

    def _beats(self) -> list[int]:
        return [self._store.add(beat_of(rank), 0) for rank in range(self.group.size)]

    def _reports(self) -> dict[int, Report]:
        keys = {rank: f"report {self._round} {rank}" for rank in range(self.group.size)}
        return {
            rank: Report(**json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])
        }

    def conclude(self, failure: Failure | None) -> None:
        """Apply a verdict: None continues; a failure ends the process group, for all models of these ranks.

        A caller outside of the polling thread knows the failure by other means. The first failure stands.
        """
        if failure is None:
            self._round, self._began = self._round + 1, None
        elif self.failure is None:
            ended = watches(self.process_group)
            for watch in ended:
                watch.failure = failure
                watch._concluded.set()
            transport_of(self.process_group).end("the ranks' process group has ended")
            shut(self._links)
            all_steps = [watch.steps for watch in ended]
            threading.Thread(target=abort, args=(self.group.device, all_steps), daemon=True).start()
        self._concluded.set()


def watches(process_group: Any) -> list[Watch]:
    """This process' watches over the ranks of `process_group`."""
    return [polled for polled in POLLER.all() if isinstance(polled, Watch) and polled.process_group == process_group]


def watched(all_watches: Iterable[Watch]) -> ExitStack:
    with ExitStack() as stack:  # if one raises, it exits the earlier ones
        for watch in all_watches:
            stack.enter_context(watch)
        return stack.pop_all()


def watched_ranks(group: TensorParallelGroup) -> ExitStack:
    """Enter the watches of all models of these ranks; none if the process group is missing or destroyed."""
    try:
        process_group = group.process_group
    except RuntimeError:
        return ExitStack()
    return watched(watches(process_group))


def _leave(store: Store, rank: int) -> None:
    with suppress(RuntimeError):  # the store may have ended with the rank that hosts it
        store.add(beat_of(rank), LEFT)
