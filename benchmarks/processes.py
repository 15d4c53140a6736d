"""Processes of calls, one per rank: started together, ended by their ids, with their errors shown."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parent.parent
"""The clone of the repository."""

_GRACE = 10.0
"""Seconds for the other processes to end by themselves after one has failed."""

_TERM = 3.0
"""Seconds between SIGTERM and SIGKILL."""

_STDERR = 6000
"""Characters of a process' stderr in an error."""


class ProcessError(Exception):
    """A process failed or timed out; the message has its number and stderr."""


def start(
    target: str,
    job: Mapping[str, Any],
    result: Path,
    output: Path,
    *,
    env: Mapping[str, str] | None = None,
    copy: bool = False,
) -> BaseProcess:
    """Start a process, in a session of its own, that calls a function and writes what it returns.

    Args:
        target: "module:function"; it returns what JSON can hold.
        job: the keyword arguments.
        result: the file for the returned value, as JSON.
        output: the file to which stdout and stderr are appended.
        env: additional environment variables.
        copy: if True, the process is a copy of this one, and need not import what this one has imported.
    """
    context: Any = multiprocessing.get_context("fork" if copy else "spawn")
    parent = os.getpid() if copy else None
    process: BaseProcess = context.Process(target=_call, args=(target, job, result, output, parent))
    with mock.patch.dict(os.environ, env or {}):  # libraries read them as they are imported
        process.start()
    return process


def _call(target: str, job: Mapping[str, Any], result: Path, output: Path, parent: int | None) -> None:
    """What a process does. `parent`: the id of the process of which this one is a copy."""
    os.setsid()
    if parent is not None:
        from tp_transformers.features.run.launch import end_with_parent

        end_with_parent(parent=parent)
    with output.open("ab") as file:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(file.fileno(), descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w", buffering=1, closefd=False))
    module, _, function = target.partition(":")
    result.write_text(json.dumps(getattr(import_module(module), function)(**job)), encoding="utf-8")


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
        target, jobs, env, copy: as `start` takes them, for each call.
        timeout: seconds for all processes together.
        log: a file to which the processes append their output; by default each has one of its own, for errors alone.
        watch: called every twentieth of a second until all have ended.

    Raises:
        ProcessError: if one exits with a nonzero code or does not end in time. No process is left running.
    """
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [log or Path(scratch, f"{number}.stderr") for number in range(len(jobs))]
        starts = [output.stat().st_size if output.exists() else 0 for output in outputs]
        results = [Path(scratch, f"{number}.json") for number in range(len(jobs))]
        processes: list[BaseProcess] = []
        try:
            for number, job in enumerate(jobs):
                own = env[number] if env else None
                processes.append(start(target, job, results[number], outputs[number], env=own, copy=copy))
            _wait(processes, timeout, watch)
        finally:
            codes = [process.exitcode for process in processes]
            for process in processes:
                end(process)
        if any(code != 0 for code in codes):
            ends = zip(codes, outputs, starts, strict=True)
            raise ProcessError("\n".join(_report(target, number, *each) for number, each in enumerate(ends)))
        return [json.loads(result.read_bytes()) for result in results]


def run_ranks(
    target: str,
    job: Mapping[str, Any],
    *,
    ranks: Iterable[int] | None = None,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> list[Any]:
    """Call a function on ranks, with the keyword arguments `rank` and `store`, a new file, too; see `run`.

    Args:
        job: the other keyword arguments; "size" is the number of ranks, "store" may be another one.
        ranks: the ranks that run; None for all.
        threads: of each rank; None for equal parts of the cores.
        env: additional environment variables of all ranks.
    """
    numbers = list(range(job["size"]) if ranks is None else ranks)
    threads = threads or max(1, len(os.sched_getaffinity(0)) // len(numbers))
    sizes = {"WORLD_SIZE": str(job["size"]), "LOCAL_WORLD_SIZE": str(len(numbers))}
    shared = {**sizes, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as scratch:
        return run(
            target,
            [{"store": f"{scratch}/store", **job, "rank": rank} for rank in numbers],
            env=[{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})} for rank in numbers],
            **options,
        )


def free_port() -> int:
    """A TCP port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(process: BaseProcess) -> None:
    """End a process that `start` has started, and all processes of its session, also if it has ended.

    SIGTERM first: it may have started processes in sessions of their own, which it ends.
    """
    process.terminate()
    process.join(_TERM)
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _wait(processes: Sequence[BaseProcess], timeout: float, watch: Callable[[], None] | None) -> None:
    """Return when all have ended, after `timeout`, or once one has failed and the others had time to notice."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if None not in codes:
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + _GRACE)
        if watch is not None:
            watch()
        time.sleep(0.05)


def _report(target: str, number: int, code: int | None, output: Path, start: int) -> str:
    ended = "still running, was ended" if code is None else f"exit code {code}"
    text = output.read_bytes()[start:].decode(errors="replace")[-_STDERR:] if output.exists() else ""
    return f"--- {target}, process {number}: {ended}\n{text}"
