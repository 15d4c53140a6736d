"""One rank of an elastic server: it takes part in one generation of ranks after the other.

    announced: ranks 0, 1, 2 ─ process group ─ load or reshard ─ batches ... a rank is lost, or comes
    stop: all waiting calls raise ─ process group destroyed, requests kept ─ announced: ranks 0, 2 ─ ...

The agent says who takes part, and when a generation ends. Nothing else does: an error that another rank causes is told
to the agent, and waits for its word.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transformers import GenerationMixin

from ...errors import MeshError, RemoteRankError, UnsupportedError
from ...errors import size as in_bytes
from ...ranks.direct import transport_of
from ...ranks.group import TensorParallelGroup, agreed
from ...ranks.mesh import LATE, forget_graphs, join
from ...strategies import layout_of, local_tensor, unsharded_like
from ...torch_api import world
from ..reshard.described import Moved
from ..reshard.reshard import REPORT, reshard
from ..serve.batches import check_caches, make_batches
from ..serve.rank import Rank, leave_out_tracebacks
from ..serve.requests import Answers
from ..shares.measures import free_memory
from ..watch.calls import WATCH
from ..watch.failure import Failure, follows
from ..watch.poller import POLLER
from ..watch.sockets import connections, connections_to, shut
from ..watch.watch import Watch
from .agent import GENERATION, NUMBER, TICK
from .running import Running

SOON = 2.0
"""Seconds in which a change of the ranks is announced whose consequence an error may be."""
ENDED = Failure(-1, "is another from now on: the ranks change", is_lost=True)
"""The failure of watches whose ranks change."""


class Member:
    """One rank. `run` in one thread; `answers` for the server of the first rank, once `serves` is set."""

    def __init__(self, rank: Rank, port: int | None) -> None:
        """`port`: of the HTTP server in this process, whose connections are left alone. Connects to the agent."""
        self.rank, self.port, self.number = rank, port, int(os.environ[NUMBER])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=60))
        self._changes = threading.Event()
        self._running = Running()
        self._scheduler: Any = None
        self._first: Any = None
        """The manager of the first batches, whose queues and status all later ones have."""
        self.model: Any = None
        self._watch: Watch | None = None
        """Of the model that serves."""
        self.answers: Answers | None = None
        self.serves = threading.Event()
        self.error: BaseException | None = None
        self.store.set(f"here {self.number}", "")

    def run(self) -> None:
        """Take part in generations of ranks until the server ends, or an error of this rank ends it: `error`."""
        generation = 0
        try:
            while True:
                generation, members, shares = self._announced(generation)
                with self._heard(generation):
                    try:
                        self._take_part(generation, members, shares)
                        return
                    except Exception as error:
                        if not self._is_change(generation, error):
                            raise
                    self._leave()
                self.store.set(f"stopped {generation} {self.number}", "")
        except BaseException as error:
            self.error = error
            self._running.fail(RuntimeError(str(error)))
            if self._first is not None:
                self._first.background_thread_status.fatal_error = error
        finally:
            if self._first is not None:
                status = self._first.background_thread_status
                type(status).mark_as_stopped(status)
            self.serves.set()

    def _announced(self, after: int) -> tuple[int, list[int], list[float] | None]:
        """The number, the members and the shares of the next generation that this rank takes part in.

        The environment has the rank, as torchrun sets it.
        """
        deadline = time.monotonic() + LATE.total_seconds()
        while time.monotonic() < deadline:
            generation, members, shares, port = json.loads(self.store.get(GENERATION))
            if generation > after and self.number in members:
                size, place = len(members), members.index(self.number)
                here = {"RANK": place, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in here.items()})
                return generation, members, shares
            time.sleep(TICK)
        got = f"none within {LATE.total_seconds():.0f} s"
        raise MeshError("an announcement of ranks", got=got, expected="one", fix="Start the server again.")

    @contextmanager
    def _heard(self, generation: int) -> Iterator[None]:
        """Hear meanwhile whether the agent stops a generation."""
        self._changes, over = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._hear, args=(generation, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _hear(self, generation: int, over: threading.Event) -> None:
        stopped_at = None
        while not over.wait(TICK):
            try:
                if stopped_at is None and self.store.check([f"stop {generation}"]):
                    stopped_at = time.monotonic()
                    self._changes.set()
                elif self._watch is not None and self._watch.failure not in (None, ENDED):
                    self._trouble(generation)
            except RuntimeError:  # the agent has ended
                os._exit(1)
            if stopped_at is not None:
                with suppress(RuntimeError, KeyError):  # groups that end meanwhile
                    self._interrupt(also_stores=time.monotonic() - stopped_at > SOON)

    def _interrupt(self, *, also_stores: bool) -> None:
        """Let all calls raise in which this rank waits for others. May be called again."""
        for watch in POLLER.all():
            if isinstance(watch, Watch) and watch.failure is None:
                watch.conclude(ENDED)
        for group in list(world.pg_map):
            transport_of(group).end("the ranks change")
        links = connections(self.store) | (connections_to(int(os.environ["MASTER_PORT"])) if also_stores else {})
        shut({each: ends for each, ends in links.items() if self.port not in (ends[0][1], ends[1][1])})

    def _trouble(self, generation: int) -> None:
        """Tell the agent that this rank cannot reach others, and which one is silent, if the watch knows."""
        failure = self._watch.failure if self._watch is not None else None
        lost = failure.rank if failure is not None and failure is not ENDED and failure.is_lost else None
        self.store.set(f"trouble {generation}", json.dumps(lost))

    def _is_change(self, generation: int, error: Exception) -> bool:
        """True if another rank caused an error, or may have: the agent stops the generation."""
        if self._changes.is_set():
            return True
        if not isinstance(error, RemoteRankError) and not follows(error):
            return self._changes.wait(SOON)
        self._trouble(generation)
        return self._changes.wait(self.rank.silence)

    def _leave(self) -> None:
        """Let go of all that belongs to the ranks of a generation, but not of the model."""
        if self._scheduler is not None:
            self._running.keep(self._scheduler)
        self._scheduler = self._watch = None
        if self._first is not None:
            self._first.model, self._first.batch_processor = None, ()
        if isinstance(self.model, Moved):
            self.model = None
        gc.collect()
        forget_graphs()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _take_part(self, generation: int, members: list[int], shares: list[float] | None) -> None:
        """Serve with the ranks of a generation, until the server ends. Raises if another rank is lost."""
        self._arrive(generation, members)
        union = join()
        read, received = self._have_model(union, shares)
        self._watch = WATCH.find(self.model)
        manager, room = self._batches()
        failures: list[Exception] = []
        step = manager._generation_loop_body

        def checked(*args: Any, **kwargs: Any) -> Any:
            self._check()
            return step(*args, **kwargs)

        manager._generation_loop_body = checked
        manager._handle_critical_error = lambda error, _: failures.append(error)
        if self.answers is None and union.rank == 0:
            self.answers = Answers(stand_in(self.model), manager, room)
        if self.answers is not None:
            self.answers.room = room
        count = self._running.again(room)
        self.store.set(f"ready {generation} {self.number}", json.dumps((read, received, count)))
        self.serves.set()
        manager._run_generation_loop(False)
        if failures:
            raise failures[0]

    def _arrive(self, generation: int, members: list[int]) -> None:
        """Wait for the other ranks at the store, where a wait can be ended."""
        self.store.set(f"arrived {generation} {self.number}", "")
        while not self.store.check([f"arrived {generation} {number}" for number in members]):
            self._check()
            time.sleep(TICK)

    def _check(self) -> None:
        """Raise RemoteRankError if the agent has stopped the generation: a rank alone waits in no collective."""
        if self._changes.is_set():
            raise RemoteRankError("the ranks change")

    def _have_model(self, union: TensorParallelGroup, shares: list[float] | None) -> tuple[int, int]:
        """Load the model, or reshard the model that some ranks have; returns bytes from files, and from ranks."""
        told = union.gather((*sizes(self.model), free_memory(union.device, union.size)))
        if was := max(each[0] for each in told):
            if union.size < was:
                check_room([each[1:] for each in told], shares, on_cpu=union.device.type == "cpu")
            try:
                self.model = reshard(self.model, shares or union.size)
                report = REPORT.of(self.model)
                return report.bytes_read, report.ranks
            except UnsupportedError:  # packed weights, of which a rank is lost
                self.model = None
        self.model = self.rank.load(**({"tp_shares": shares} if shares else {}))
        return self.model.tp_report.bytes_read, 0

    def _batches(self) -> tuple[Any, int]:
        """Batches of the present ranks, which have not started; and the most tokens of a request."""
        manager = make_batches(self.model, self.rank.context.params, self.rank.silence)
        self._running.give(manager)
        if self._first is None:
            self._first = manager
            manager._generation_thread, manager._original_attn_impl = threading.current_thread(), None
            manager.background_thread_status.mark_as_stopped = lambda: None  # before the last ranks have
            leave_out_tracebacks(manager)
        else:
            for name in ("background_thread_status", "_wake_up_loop", "_generation_thread"):
                setattr(manager, name, getattr(self._first, name))
        with torch.no_grad():
            manager.batch_processor = manager._create_batch_processor()
        self._scheduler = manager.batch_processor.scheduler
        return manager, check_caches(self.model, manager)


def sizes(model: Any) -> tuple[int, int, int, int]:
    """The ranks of a model, bytes of its complete tensors that are sharded, of those that are not, of the shards."""
    if model is None:
        return 0, 0, 0, 0
    tensors = {id(each): each for each in model.parameters()}.values()
    split = sum(unsharded_like(each).nbytes for each in tensors if layout_of(each) is not None)
    whole = sum(each.nbytes for each in tensors if layout_of(each) is None)
    return model.tp_size, split, whole, sum(local_tensor(each).nbytes for each in tensors)


def check_room(told: list[tuple[int, int, int, int]], shares: list[float] | None, *, on_cpu: bool) -> None:
    """Raise MeshError if a model does not fit. Equal on all ranks.

    Args:
        told: of each rank, bytes of the complete tensors that are sharded, of those that are replicated, of what the
            rank holds, of free memory; the first two are 0 on a rank that has no model.
        shares: of the ranks, if they are unequal.
        on_cpu: True if old shards are freed while new ones are filled.
    """
    split, whole = max(each[:2] for each in told)
    parts = shares or [1.0] * len(told)
    for rank, (part, (_, _, held, free)) in enumerate(zip(parts, told, strict=True)):
        needed, room = int(split * part / sum(parts)) + whole, free + (held if on_cpu else 0)
        if needed > room:
            got = f"{in_bytes(needed)} of weights for rank {rank} of {len(told)}, and {in_bytes(room)} of memory"
            fix = "Serve on more ranks, or on ranks with more memory; packed weights take less."
            raise agreed(MeshError("the ranks that are left", got=got, expected="ranks that hold the model", fix=fix))


def stand_in(model: Any) -> Any:
    """What the HTTP server reads of a model, which the ranks replace while it runs."""
    found = type(type(model).__name__, (GenerationMixin,), {})()
    for name in ("config", "generation_config", "name_or_path", "tp_size", "device", "dtype"):
        setattr(found, name, getattr(model, name))
    return found
