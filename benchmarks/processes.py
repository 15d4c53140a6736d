"""Fresh processes, one per rank: started together, ended by their ids, with their errors shown."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
    """A copy of this process that calls `main` of a module, and needs no imports for it; with Popen's methods."""

    def __init__(self, module: str, argument: str, output: int, env: Mapping[str, str]) -> None:
        """Start; `output`: descriptor of the file for stdout and stderr."""
        super().__init__()
        self._of_module = module, argument, output, env, os.getpid()
        self.start()

    def run(self) -> None:
        """What the copy does."""
        from tp_transformers.features.run.launch import end_with_parent

        module, argument, output, env, parent = self._of_module
        os.setsid()
        end_with_parent(parent=parent)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(output, descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w", buffering=1, closefd=False))
        os.environ.update(env)
        sys.argv = [module, argument]
        import_module(module).main()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self._of_module[0], timeout or 0.0)
        return self.exitcode


Started = subprocess.Popen[bytes] | Copy


def start(module: str, argument: str, output: int, *, env: Mapping[str, str] | None = None, copy: bool) -> Started:
    """Start `python -m module argument` in a session of its own, or with `copy` a copy of this process."""
    env = env or {}
    if copy:
        return Copy(module, argument, output, env)
    command = [sys.executable, "-m", module, argument]
    return subprocess.Popen(
        command, stdout=output, stderr=output, env={**os.environ, **env}, cwd=ROOT, start_new_session=True
    )


def run(
    module: str,
    jobs: Sequence[Mapping[str, Any]],
    *,
    timeout: float,
    env: Sequence[Mapping[str, str]] | None = None,
    log: Path | None = None,
    copy: bool = False,
    watch: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Run `python -m module JOB` concurrently for all `jobs`; returns their results.

    Args:
        module: reads its job, as JSON, from its argument, and writes a JSON object to the file `job["result"]`.
        jobs: the job of each process; "result" is added here.
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
                text = json.dumps({**job, "result": f"{scratch}/{number}.json"})
                with outputs[number].open("ab") as output:
                    own = env[number] if env else None
                    processes.append(start(module, text, output.fileno(), env=own, copy=copy))
            _wait(processes, timeout, watch)
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                end(process)
        if any(code != 0 for code in codes):
            ends = zip(codes, outputs, starts, strict=True)
            raise ProcessError("\n".join(_report(module, number, *each) for number, each in enumerate(ends)))
        return [json.loads(Path(scratch, f"{number}.json").read_bytes()) for number in range(len(jobs))]


def run_ranks(module: str, job: Any, *, timeout: float) -> list[dict[str, Any]]:
    """Run `module` on ranks of one thread each; see `run`.

    Args:
        job: a dataclass with the fields `size`, the number of ranks, and `rank`, which each rank's job has for its own.
    """
    ranks = range(job.size)
    own = {"WORLD_SIZE": str(job.size), "OMP_NUM_THREADS": "1"}
    return run(
        module,
        [{**dataclasses.asdict(job), "rank": rank} for rank in ranks],
        timeout=timeout,
        env=[{**own, "RANK": str(rank)} for rank in ranks],
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


def _report(module: str, number: int, code: int | None, output: Path, start: int) -> str:
    ended = "still running, was ended" if code is None else f"exit code {code}"
    text = output.read_bytes()[start:].decode(errors="replace")[-_STDERR:]
    return f"--- {module}, process {number}: {ended}\n{text}"
