"""Fresh processes, one per rank: started together, ended by their ids, with their errors shown."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

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


def run(
    module: str,
    jobs: Sequence[Mapping[str, Any]],
    *,
    timeout: float,
    env: Sequence[Mapping[str, str]] | None = None,
    log: IO[bytes] | None = None,
) -> list[dict[str, Any]]:
    """Run `python -m module JOB` concurrently for all `jobs`; returns their results.

    Args:
        module: reads its job, as JSON, from its argument, and writes a JSON object to the file `job["result"]`.
        jobs: the job of each process; "result" is added here.
        timeout: seconds for all processes together.
        env: additional environment variables of each process.
        log: a file to which the output of all processes is appended at the end, also after an error.

    Raises:
        ProcessError: if one exits with a nonzero code or does not end in time. No process is left running.
    """
    with tempfile.TemporaryDirectory() as scratch:
        processes = []
        try:
            for number, job in enumerate(jobs):
                text = json.dumps({**job, "result": f"{scratch}/{number}.json"})
                with open(f"{scratch}/{number}.stderr", "wb") as stderr:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", module, text],
                            stdout=stderr,
                            stderr=stderr,
                            env={**os.environ, **(env[number] if env else {})},
                            cwd=ROOT,
                            start_new_session=True,
                        )
                    )
            _wait(processes, timeout)
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                end(process)
            if log is not None:
                log.writelines(path.read_bytes() for path in sorted(Path(scratch).glob("*.stderr")))
        if any(code != 0 for code in codes):
            raise ProcessError("\n".join(_report(module, scratch, number, code) for number, code in enumerate(codes)))
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


def end(process: subprocess.Popen[Any]) -> None:
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


def _wait(processes: Sequence[subprocess.Popen[Any]], timeout: float) -> None:
    """Return when all have ended, after `timeout`, or once one has failed and the others had time to notice."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.05)


def _report(module: str, scratch: str, number: int, code: int | None) -> str:
    ended = "still running, was ended" if code is None else f"exit code {code}"
    stderr = Path(scratch, f"{number}.stderr").read_text(encoding="utf-8", errors="replace")[-_STDERR:]
    return f"--- {module}, process {number}: {ended}\n{stderr}"
