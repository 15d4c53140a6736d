"""Machines and networks that fail during forwards: all ranks that are left stop with one error, or nothing happens."""

import json
import re
import time
from typing import Any

import pytest

from tests.support.machines import Bed, Ended, needs_machines, start, wait
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, needs_machines]


class Running:
    """A launch in which all ranks make forwards."""

    def __init__(self, bed: Bed, ranks: list[int], folder: str, seconds: float, **load: Any) -> None:
        options = json.dumps({"seconds": seconds, "load": load})
        job = ["-m", "tests.support.machine_job", folder, str(bed.disk), options]
        self.started = start(bed, ranks, *job)
        until(lambda: self.outputs().count("READY") >= sum(ranks), said=self.outputs)
        self.began = time.time()

    def outputs(self) -> str:
        return "\n".join(log.read_text() for _, log in self.started)

    def wait(self, *machines: int, timeout: float = 120) -> list[Ended]:
        """Wait until the launches on these machines have ended."""
        return [wait(*self.started[machine], timeout) for machine in machines]

    def errors(self, *ranks: int, timeout: float = 90) -> list[tuple[float, str]]:
        """(seconds since the fault, error) of each rank, once so many `ranks` of each machine have raised.

        Does not wait for torchrun: its own calls of a store on a lost machine end after the kernel's 15 minutes.
        """

        def found() -> list[tuple[str, str]]:
            logs = [log.read_text() for (_, log), number in zip(self.started, ranks, strict=True) if number]
            return [error for log in logs for error in re.findall(r"^RAISED ([\d.]+) (.*)", log, re.MULTILINE)]

        until(lambda: len(found()) >= sum(ranks), timeout, self.outputs)
        assert len(found()) == sum(ranks), self.outputs()
        errors = [(float(at) - self.began, text) for at, text in found()]
        print(*(f"{seconds:.1f} s: {text}" for seconds, text in errors), sep="\n")
        return errors


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_vanishes(cases, tmp_path, lost) -> None:
    """The last one, or that of the store, where all ranks meet."""
    with Bed(tmp_path, 2) as bed:
        running = Running(bed, [2, 2], cases(9, 3).folder, 300)
        bed.machines[lost].vanish()
        running.began = time.time()
        errors = running.errors(*([0, 2] if lost == 0 else [2, 0]))
        assert len({text for _, text in errors}) == 1, errors
        assert all(seconds < 45 for seconds, _ in errors), errors


@pytest.mark.parametrize("lost", [0, 1])
def test_a_launcher_that_is_killed(cases, tmp_path, lost) -> None:
    """SIGKILL of torchrun and its ranks; the network stays."""
    with Bed(tmp_path, 2) as bed:
        running = Running(bed, [1, 2], cases(9, 3).folder, 300)
        running.started[lost][0].kill()
        running.began = time.time()
        errors = running.errors(*([0, 2] if lost == 0 else [1, 0]))
        assert all(seconds < 30 for seconds, _ in errors), errors


def test_a_link_that_stalls_for_a_moment(cases, tmp_path) -> None:
    with Bed(tmp_path, 2) as bed:
        running = Running(bed, [1, 1], cases(9, 3).folder, 20)
        bed.machines[1].unplug()
        time.sleep(5)
        bed.machines[1].plug()
        ended = running.wait(0, 1)
        assert [one.code for one in ended] == [0, 0], running.outputs()
        assert running.outputs().count("DONE") == 2


def test_a_link_that_stalls_for_long(cases, tmp_path) -> None:
    with Bed(tmp_path, 2) as bed:
        running = Running(bed, [2, 1], cases(9, 3).folder, 300)
        bed.machines[1].unplug()
        running.began = time.time()
        errors = running.errors(2, 1)
        assert all(seconds < 60 for seconds, _ in errors), errors
        bed.machines[1].plug()
        assert all(one.code not in (0, -9) for one in running.wait(0, 1, timeout=60)), running.outputs()


def test_a_slow_network_that_loses_packets(cases, tmp_path) -> None:
    """In each direction, packets are held back for 100 ms, and two of a hundred are lost."""
    with Bed(tmp_path, 2, delay=0.1, loss=0.02) as bed:
        running = Running(bed, [1, 1], cases(9, 3).folder, 20)
        ended = running.wait(0, 1)
        assert [one.code for one in ended] == [0, 0], running.outputs()
        assert running.outputs().count("DONE") == 2
