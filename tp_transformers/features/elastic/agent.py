"""The agent of an elastic server: it starts the ranks, and says which of them serve.

A generation of ranks ends when one of them is lost, when one can no longer reach the others, or when one has come. The
agent then stops the generation, waits until the ranks have stopped, ends those that do not, and announces the next.
Ranks meet the agent at a store, which this process hosts, and the ranks of a generation at a further one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...errors import size
from ...ranks.limits import visible_cores
from ..run.errors import FOLDER, error_lines, keep_codes
from ..run.launch import signals_passed_on
from ..serve.command import STOP
from ..watch.process import status_of
from ..watch.watch import BUSY

PARENT = "TP_TRANSFORMERS_AGENT_OF_SERVER"
"""Environment variable of a rank: the process id of the agent."""
NUMBER = "TP_TRANSFORMERS_MEMBER"
"""Environment variable of a rank: a number that no other process of the server has had."""
GENERATION = "generation"
"""Key of the store, in JSON: number of the generation, numbers of its ranks in order, their shares or None, port of
the store at which they meet."""
TICK = 0.05
"""Seconds between two looks at the store and at the processes."""
START = 600.0
"""Seconds in which a process has to start; the least seconds that ranks get to load weights again."""
RENEWALS = 3
"""Generations in a row that may end although no rank is lost or has come."""


@dataclass(eq=False)
class Process:
    number: int
    slot: int
    """The device, and the rank in what is printed."""
    process: subprocess.Popen[bytes]
    why: str = ""
    """Why the agent has killed it."""
    stopped_at: float | None = None
    """When a signal was first seen to have stopped it."""

    def kill(self, why: str) -> None:
        self.why = self.why or why
        self.process.kill()

    def kill_if_stopped(self, seconds: float) -> None:
        """Kill the process if a signal has stopped it for so long; it would keep others waiting."""
        is_stopped = "".join(status_of(self.process.pid)[:1]) in ("T", "t")
        self.stopped_at = (self.stopped_at or time.monotonic()) if is_stopped else None
        if self.stopped_at is not None and time.monotonic() - self.stopped_at > seconds:
            self.kill(f"was stopped for {seconds:g} s")

    def ended(self) -> str:
        """How it has ended; "" if it runs."""
        code = self.process.poll()
        if code is None:
            return ""
        return self.why or f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class _EndedError(Exception):
    """The server has ended, or has to."""


class Agent:
    """The processes of one elastic server."""

    def __init__(
        self, program: Sequence[str], arguments: argparse.Namespace, *, shares: Sequence[float] | None, rejoin: float
    ) -> None:
        """Prepare the start of `arguments.ranks` processes that run `program`, the arguments of Python.

        Args:
            arguments: of the command.
            shares: of the ranks, if they are unequal.
            rejoin: seconds until a lost rank is started again, 0 for never; twice as long after each further loss.
        """
        self.program, self.shares, self.rejoin = program, shares, rejoin
        self.ranks, self.verbose, self.log = arguments.ranks, arguments.verbose, arguments.log
        self.watch, self.drain = arguments.watch, arguments.drain
        self.store, self.meetings = _store(), list[TCPStore]()
        self.processes: list[Process] = []
        """Those that run, by slot: members, and such as are coming."""
        self.members: list[Process] = []
        """The ranks of the generation."""
        self.generation = self.started = self.renewals = self.noted = 0
        self.losses, self.due = [0] * self.ranks, dict[int, float]()
        """How often each slot has lost its rank; slot -> the time at which a rank is started again."""
        self.causes, self.since = list[str](), 0.0
        """What has happened since all ranks served, and when the first of it did."""
        self.took: float | None = None
        """Seconds of the first load, which has no limit; None until all ranks have served."""
        self.came: list[int] = []
        """Signals that end the server."""
        self.end_at = float("inf")

    def run(self) -> int:
        """Serve until a signal, or until rank 0 ends; returns the exit code. Prints each error of ranks once."""
        with tempfile.TemporaryDirectory(prefix="tp-errors-") as folder:
            if not self.verbose:
                os.environ[FOLDER] = folder
            signal.signal(signal.SIGUSR1, lambda *_: self.due.update(dict.fromkeys(self.due, 0.0)))
            self._announce()
            first = self._start(0)
            try:
                with signals_passed_on(first.process, signal.SIGTERM) as self.came:
                    for slot in range(1, self.ranks):
                        self._start(slot)
                    try:
                        self._serve()
                    except _EndedError:
                        code = self._end(first)
            finally:
                for each in self.processes:
                    each.process.kill()
                    each.process.wait()
            if self.came:
                raise KeyboardInterrupt if self.came[0] == signal.SIGINT else SystemExit(128 + self.came[0])
            if code and not self.verbose:
                print(*error_lines(Path(folder), "serve"), sep="\n", file=sys.stderr)
            return code

    def _start(self, slot: int) -> Process:
        self.started += 1
        environment = {
            "OMP_NUM_THREADS": str(max(1, visible_cores() // self.ranks)),
            **os.environ,
            PARENT: str(os.getpid()),
            NUMBER: str(self.started),
            "RANK": str(slot),
            "LOCAL_RANK": str(slot),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        process = subprocess.Popen([sys.executable, *self.program], env=environment, start_new_session=True)
        started = Process(self.started, slot, process)
        self.processes = sorted([*self.processes, started], key=lambda each: each.slot)
        return started

    def _announce(self) -> None:
        shares = [self.shares[each.slot] for each in self.members] if self.shares else None
        self.meetings = [*self.meetings[-1:], _store()]  # old watches still tell the store before
        numbers, port = [each.number for each in self.members], self.meetings[-1].port
        self.store.set(GENERATION, json.dumps((self.generation, numbers, shares, port)))

    def _serve(self) -> None:
        """One generation of ranks after the other. Raises _EndedError at the end."""
        deadline = time.monotonic() + START
        while self._told("here") != self.processes:
            self._tick()
            if time.monotonic() > deadline:
                raise _EndedError
        while True:
            self.generation, self.members = self.generation + 1, self._told("here")
            self._announce()
            self.noted = len(self.causes)
            has_served = self._until_it_ends()
            self.store.set(f"stop {self.generation}", "")
            self._until_stopped(self._patience(has_served))

    def _told(self, what: str) -> list[Process]:
        """The processes that have written a key."""
        return [each for each in self.processes if self.store.check([f"{what} {each.number}"])]

    def _tick(self) -> None:
        """Look at the processes, and start those that are due. Raises _EndedError if the server has ended."""
        time.sleep(TICK)
        now = time.monotonic()
        if self.came:
            self.end_at = min(self.end_at, now + self.drain + 2 * STOP)
            self.due.clear()
        for each in self.processes:
            each.kill_if_stopped(self.watch)
        for each in [each for each in self.processes if each.ended()]:
            if not each.slot or self.took is None:
                raise _EndedError
            self.processes.remove(each)
            if each in self.members:
                self._note(f"rank {each.slot} {each.ended()}{self._error_of(each)}")
            self.losses[each.slot] += 1
            if self.rejoin:
                self.due[each.slot] = now + self.rejoin * 2 ** (self.losses[each.slot] - 1)
        if now > self.end_at:
            raise _EndedError
        for slot in [slot for slot, at in self.due.items() if at <= now]:
            del self.due[slot]
            self._start(slot)

    def _note(self, cause: str) -> None:
        self.since = self.since if self.causes else time.monotonic()
        self.causes.append(cause)

    def _error_of(self, ended: Process) -> str:
        """The first line of the error with which a rank ended, in brackets; the error is not printed again."""
        file = Path(os.environ.get(FOLDER, ""), f"{self.members.index(ended)}.rank")
        if self.verbose or not file.exists():
            return ""
        text = json.loads(file.read_text(encoding="utf-8"))[0]
        file.unlink()
        return f" ({text.splitlines()[0]})" if text else ""

    def _until_it_ends(self) -> bool:
        """Watch a generation until a rank is lost, or has come, or cannot reach the others; True if all have served."""
        is_ready, began = False, time.monotonic()
        while all(each in self.processes for each in self.members):
            self._tick()
            ready = self._told(f"ready {self.generation}")
            if not is_ready and ready == self.members:
                is_ready, self.took = True, self.took or time.monotonic() - began
                self._say()
            limit = max(START, self._patience(has_served=False))
            if not is_ready and self.took is not None and time.monotonic() > began + limit:
                for each in self.members:
                    if each not in ready:
                        each.kill(f"did not serve within {limit:.0f} s")
            if self.store.check([f"trouble {self.generation}"]):
                lost = json.loads(self.store.get(f"trouble {self.generation}"))
                if lost is not None:
                    self.members[lost].kill("gave no sign of life")
                break
            if is_ready and (come := [each for each in self._told("here") if each not in self.members]):
                for each in come:
                    self._note(f"rank {each.slot} has come")
                break
        return is_ready

    def _say(self) -> None:
        """One line about a change of the ranks, when all serve again."""
        if self.causes:
            told = [json.loads(self.store.get(f"ready {self.generation} {each.number}")) for each in self.members]
            read, received = (sum(each[index] for each in told) for index in (0, 1))
            count, seconds = told[0][2], time.monotonic() - self.since
            self.log(
                f"{'; '.join(self.causes)}: {len(self.members)} of {self.ranks} ranks serve after {seconds:.1f} s, "
                f"{read:,} bytes read from files, {size(received)} sent by ranks, {count} requests go on"
            )
        self.causes, self.noted = [], 0

    def _patience(self, has_served: bool) -> float:
        """Seconds for ranks to stop: a read of weights is not broken off, but takes not much longer than the first."""
        loading = START if self.took is None else BUSY * (self.watch + self.took)
        return float(BUSY * self.watch if has_served else loading)

    def _until_stopped(self, seconds: float) -> None:
        """Wait for the ranks of a generation to leave; those that do not in time are killed."""
        deadline = time.monotonic() + seconds
        while waiting := [
            each
            for each in self.members
            if each in self.processes and each not in self._told(f"stopped {self.generation}")
        ]:
            self._tick()
            if time.monotonic() > deadline:
                for each in waiting:
                    each.kill(f"did not stop within {seconds:.0f} s")
        self.renewals = self.renewals + 1 if len(self.causes) == self.noted else 0
        if self.renewals:
            self._note("ranks could not reach one another")
        if self.renewals > RENEWALS:
            self.log("; ".join(self.causes))
            raise _EndedError

    def _end(self, first: Process) -> int:
        """Wait for the ranks to end by themselves; returns the exit code of the one that failed first."""
        deadline = time.monotonic() + (2 * STOP if (first.process.poll() or 0) >= 0 else 0)
        failed = [each for each in self.processes if each.process.poll()][:1]
        while any(each.process.poll() is None for each in self.processes) and time.monotonic() < deadline:
            time.sleep(TICK)
        if first.why:
            self.log(f"rank {first.slot} {first.why}: the server ends")
        if not self.verbose:
            ended = [each for each in self.processes if not each.why]
            keep_codes({each.slot: code for each in ended if (code := each.process.poll())})
        code = failed[0].process.returncode if failed else first.process.poll()
        return 1 if code is None else code if code >= 0 else 128 - code


def _store() -> TCPStore:
    """A store that this process hosts."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
