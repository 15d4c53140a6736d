"""Mutated inputs with fixed seeds, and files of those that fail: `python -m tests.support.fuzz FILE` replays one.

`FUZZ=10` makes 10 times as many cases of every fuzz test. A case depends on the test, the seed and its number alone, so
that more cases begin with the same ones. `FUZZ_FINDINGS` is the folder of the findings, build/fuzz-findings unless set.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 60
"""Processor time after which a case counts as one that never ends."""


@dataclass(frozen=True)
class Case:
    """One mutated input of a test."""

    test: str
    """Its name for pytest, with the seed: `tests/unit/x.py::test_y[0]`."""
    number: int
    content: bytes

    @property
    def finding(self) -> Path:
        """The file that is there while the case runs, and stays if it fails."""
        folder = Path(os.environ.get("FUZZ_FINDINGS") or ROOT / "build" / "fuzz-findings")
        return folder / f"{re.sub('[^a-z0-9]+', '-', self.test.rpartition('/')[2].lower())}{self.number}.json"

    def write(self) -> None:
        """Write the finding: the test, the number, and the input as base64, and as text to read."""
        self.finding.parent.mkdir(parents=True, exist_ok=True)
        entry = {"test": self.test, "number": self.number, "input": base64.b64encode(self.content).decode()}
        self.finding.write_text(json.dumps({**entry, "text": self.content.decode(errors="replace")[:2000]}, indent=1))


def fuzz_cases(seed: int, count: int, mutated: Callable[[random.Random], bytes]) -> Iterator[Case]:
    """`count` inputs, or as many more as FUZZ says; the one of a finding in a replay of it."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
    replayed = os.environ.get("FUZZ_REPLAY")
    if replayed:
        entry = json.loads(Path(replayed).read_text())
        yield Case(test, entry["number"], base64.b64decode(entry["input"]))
        return
    for number in range(count * int(os.environ.get("FUZZ") or 1)):
        yield Case(test, number, mutated(random.Random(f"{seed} {number}")))


@contextmanager
def kept(*cases: Case) -> Iterator[None]:
    """Keep the findings of `cases` if the block fails, takes SECONDS, or ends the process."""
    for case in cases:
        case.write()
    before = signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    except BaseException:
        print("replay:", *(f"python -m tests.support.fuzz {case.finding}" for case in cases), sep="\n")
        raise
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    for case in cases:
        case.finding.unlink()


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s of processor time")


def calls(function: Callable[[], Any]) -> int:
    """How many functions are called in a call: a measure of work that does not depend on the machine."""
    counted = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return counted


def replay(finding: str) -> int:
    """Run the test of a finding with its input alone; returns pytest's exit code."""
    test = json.loads(Path(finding).read_text())["test"]
    environment = {**os.environ, "FUZZ_REPLAY": str(Path(finding).resolve())}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", test], cwd=ROOT, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(max(map(replay, sys.argv[1:]), default=2))
