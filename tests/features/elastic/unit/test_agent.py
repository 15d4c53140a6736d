"""How long an agent waits for ranks that do not stop."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

agents = pytest.importorskip("tp_transformers.features.elastic.agent")


def agent(said: list[str]) -> Any:
    arguments = SimpleNamespace(ranks=2, verbose=True, log=said.append, watch=10.0, drain=1.0)
    return agents.Agent([], arguments, shares=None, rejoin=0)


def test_a_deadlock_while_weights_are_read_costs_as_much_as_the_first_load_allows() -> None:
    found = agent([])
    assert (found._patience(True), found._patience(False)) == (60, 600)
    found.took = 2.0
    assert (found._patience(True), found._patience(False)) == (60, 72)
    found.took = 500.0
    assert found._patience(False) == 3060


def test_a_rank_that_does_not_stop_is_killed() -> None:
    found = agent([])
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        member = agents.Process(2, 1, process)
        found.processes, found.members, found.took = [member], [member], 1.0
        found._until_stopped(1.0)
        assert process.poll() is not None
        assert (found.processes, found.causes) == ([], ["rank 1 did not stop within 1 s"])
    finally:
        process.kill()
        process.wait()
