"""Fresh processes, one per rank: started together, ended by their ids, with their errors shown.

`python -m benchmarks.processes MODULE:FUNCTION CALL` is one of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
"""Working directory of the processes: the clone of the repository."""

_GRACE = 10.0
"""Seconds for the other processes to end by themselves after one has failed."""

_TERM = 3.0
"""Seconds between SIGTERM and SIGKILL."""

_STDERR = 6000
"""Characters of a process' stderr in an error."""


class ProcessError(Exception):
    """A process failed or timed out; the message has its number and stderr."""


class Copy(multiprocessing.get_context("fork").Process):  # type: ignore[name-defined, misc]
    """A copy of this process, which needs no imports for its call; with Popen's methods."""

    def __init__(self, target: str, call: str, output: int, env: Mapping[str, str]) -> None:
        """Start; `output`: descriptor of the file for stdout and stderr."""
        super().__init__()
        self._started = target, call, output, env, os.getpid()
        self.start()

    def run(self) -> None:
        """What the copy does."""
        from tp_transformers.features.run.launch import end_with_parent

        target, call, output, env, parent = self._started
        os.setsid()
        end_with_parent(parent=parent)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(output, descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w", buffering=1, closefd=False))
        os.environ.update(env)
        answer(target, call)

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self._started[0], timeout or 0.0)
        return self.exitcode


Started = subprocess.Popen[bytes] | Copy


def start(target: str, call: str, output: int, *, env: Mapping[str, str] | None = None, copy: bool) -> Started:
    """Start a process for a call (see `answer`) in a session of its own, or with `copy` a copy of this process."""
    env = env or {}
    if copy:
        return Copy(target, call, output, env)
    command = [sys.executable, "-m", __name__, target, call]
    return subprocess.Popen(
        command, stdout=output, stderr=output, env={**os.environ, **env}, cwd=ROOT, start_new_session=True
    )


def answer(target: str, call: str) -> None:
    """Call the function `target`, MODULE:FUNCTION, and write what it returns; `call`: JSON, (keywords, file)."""
    module, _, function = target.partition(":")
    keywords, file = json.loads(call)
    Path(file).write_text(json.dumps(getattr(import_module(module), function)(**keywords)), encoding="utf-8")


def run(
    target: str,
    jobs: Sequence[Mapping[str, Any]],
    *,
    timeout: float,
    env: Sequence[Mapping[str, str]] | None = None,
    log: Path | None = None,
    copy: bool = False,
    watch: Callable[[], None] | None = None,
) -> list[Any]:
    """Call a function in as many processes as there are `jobs`, all at once; returns what the calls return.

    Args:
        target: "module:function"; it returns what JSON can hold.
        jobs: the keyword arguments of each call.
        timeout: seconds for all processes together.
        env: additional environment variables of each process.
        log: a file to which the processes append their output; by default each has one of its own, for errors alone.
        copy: if True, the processes are copies of this one, and need not import what this one has imported.
        watch: called every twentieth of a second until all have ended.

    Raises:
        ProcessError: if one exits with a nonzero code or does not end in time. No process is left running.
    """
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [log or Path(scratch, f"{number}.stderr") for number in range(len(jobs))]
        starts = [output.stat().st_size if output.exists() else 0 for output in outputs]
        processes: list[Started] = []
        try:
            for number, job in enumerate(jobs):
                call = json.dumps([job, f"{scratch}/{number}.json"])
                with outputs[number].open("ab") as output:
                    own = env[number] if env else None
                    processes.append(start(target, call, output.fileno(), env=own, copy=copy))
            _wait(processes, timeout, watch)
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                end(process)
        if any(code != 0 for code in codes):
            ends = zip(codes, outputs, starts, strict=True)
            raise ProcessError("\n".join(_report(target, number, *each) for number, each in enumerate(ends)))
        return [json.loads(Path(scratch, f"{number}.json").read_bytes()) for number in range(len(jobs))]


def run_ranks(
    target: str,
    job: Mapping[str, Any],
    *,
    ranks: Iterable[int] | None = None,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> list[Any]:
    """Call a function on ranks, with the keyword argument `rank` too; see `run`.

    Args:
        job: the other keyword arguments; "size" is the number of ranks.
        ranks: the ranks that run; None for all.
        threads: of each rank; None for equal parts of the cores.
        env: additional environment variables of all ranks.
    """
    numbers = list(range(job["size"]) if ranks is None else ranks)
    threads = threads or max(1, len(os.sched_getaffinity(0)) // len(numbers))
    shared = {"WORLD_SIZE": str(job["size"]), "OMP_NUM_THREADS": str(threads)}
    return run(
        target,
        [{**job, "rank": rank} for rank in numbers],
        env=[{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})} for rank in numbers],
        **options,
    )


def end(process: subprocess.Popen[Any] | Copy) -> None:
    """End a process that was started in its own session, and all processes of the session, also if it has ended.

    SIGTERM first: it may have started processes in sessions of their own, which it ends.
    """
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERM)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(processes: Sequence[Started], timeout: float, watch: Callable[[], None] | None) -> None:
    """Return when all have ended, after `timeout`, or once one has failed and the others had time to notice."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + _GRACE)
        if watch is not None:
            watch()
        time.sleep(0.05)


def _report(target: str, number: int, code: int | None, output: Path, start: int) -> str:
    ended = "still running, was ended" if code is None else f"exit code {code}"
    text = output.read_bytes()[start:].decode(errors="replace")[-_STDERR:]
    return f"--- {target}, process {number}: {ended}\n{text}"


if __name__ == "__main__":
    answer(*sys.argv[1:])
