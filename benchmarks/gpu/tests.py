"""The tests in tests/gpu on this device: those that `make test` runs too, then those of `make test-all`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

from .. import processes
from ..report import head
from .machine import SHARED
from .step import Job, Lines

FILES = ("memory", "exactness", "training", "packed", "graphs", "mixers", "faults")
"""Files by value; faults last, since a rank that hangs would take the time of the others."""
PATIENCE = "75"
"""Seconds that a test may take: two new ranks start, compile a step, and wait ten seconds for a silent one."""
REHEARSED = "two_axes"
"""The test of a rehearsal: `make test` runs the others on a CPU."""
OUTCOME = re.compile(r"^(tests/gpu/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)")


def measure(job: Job, lines: Lines) -> None:
    """Run pytest; each outcome is a line as soon as it is there."""
    if job.is_more and job.rehearses:  # it has run its test
        return
    marked = "slow" if job.is_more else "not slow"
    # Without NVML, torch would count the GPUs by creating a context, after which a process cannot be forked.
    env = {**os.environ, "DEVICE": job.kind, "COLUMNS": "200", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    env |= {} if job.rehearses else {"TEST_TIMEOUT": PATIENCE}
    if job.backend == "nccl":
        env |= {"BACKEND": "nccl", **(SHARED if job.devices < 2 else {})}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-m", marked, *(["-k", REHEARSED] if job.rehearses else [])]
    command += [f"tests/gpu/test_{name}.py" for name in FILES]
    pipe, seen = subprocess.PIPE, 0
    process = subprocess.Popen(command, cwd=processes.ROOT, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := OUTCOME.match(line):
                name, outcome = found.groups()
                seen += 1
                wrong = {"error": "see the log"} if outcome in ("FAILED", "ERROR") else {}
                lines.write({"what": name.removeprefix("tests/gpu/"), "outcome": outcome.lower(), **wrong})
    except SystemExit:  # this step is ended
        process.kill()
        raise
    if process.wait() not in (0, 1) or not seen:
        lines.write({"what": f"pytest -m {marked!r}", "error": f"exit code {process.returncode}, {seen} outcomes"})


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Counts of outcomes by file."""
    files: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        files.setdefault(line["what"].partition("::")[0], []).append(line)
    return head("file", "outcomes") + [f"| {file} | {result(of_file)} |" for file, of_file in files.items()]


def result(lines: list[dict[str, Any]]) -> str:
    """Counts of outcomes."""
    counts = Counter(line.get("outcome", "error") for line in lines)
    return ", ".join(f"{count} {name}" for name, count in counts.items())
