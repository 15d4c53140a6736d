"""Fresh processes, one a rank: started together, ended by their own ids, their errors shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
"""Where modules are started: a clone of the repository."""

_GRACE = 10.0
"""Seconds that the other processes may take to end by themselves after one has failed."""

_STDERR = 6000
"""Characters of a process' stderr that an error shows."""


class ProcessError(Exception):
    """A process failed or ran out of time; says which, and what it wrote to stderr."""


def run(
    module: str, jobs: Sequence[Mapping[str, Any]], *, timeout: float, env: Sequence[Mapping[str, str]] | None = None
) -> list[dict[str, Any]]:
    """Run `python -m module JOB` at once for all `jobs`; returns what each wrote.

    Args:
        module: reads its job, as JSON, from its argument, and writes a JSON object to the file `job["result"]`.
        jobs: what each process is to do; "result" is added here.
        timeout: seconds, for all of them together.
        env: environment variables of each process beside those of this one.

    Raises:
        ProcessError: where one of them exits with anything but 0, or in time not at all. None is left running.
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
        if any(code != 0 for code in codes):
            raise ProcessError("\n".join(_report(module, scratch, number, code) for number, code in enumerate(codes)))
        return [json.loads(Path(scratch, f"{number}.json").read_bytes()) for number in range(len(jobs))]


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that was started in a session of its own, and whatever it started there."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(processes: Sequence[subprocess.Popen[Any]], timeout: float) -> None:
    """Return when all have ended, `timeout` is over, or one has failed and the others had time to see it."""
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
