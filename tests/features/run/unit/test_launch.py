"""The launcher of ranks, with a stand-in for torchrun that starts at once: threads, environment and signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tp_transformers.features.run import launch

AGENT = """
import os, signal, sys, time
def end(number, _):
    print("told", signal.Signals(number).name, flush=True)
    time.sleep(0.5)  # as ranks that save
    print("ended by", signal.Signals(number).name, flush=True)
    sys.exit(0)
for name in ("TERM", "INT", "HUP"):
    signal.signal(getattr(signal, f"SIG{name}"), end)
print(*sys.argv[1:], flush=True)
print({name: value for name, value in os.environ.items() if name[:4] in ("PET_", "OMP_")}, flush=True)
time.sleep(float(sys.argv[-1]))
"""
LAUNCHER = """
import sys
from tp_transformers.features.run import launch
launch.AGAIN = float(sys.argv[1])
sys.exit(launch.torchrun(["script.py", sys.argv[2]], ranks=2, agent="agent"))
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the module `agent` be the stand-in."""
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def launched(tmp_path: Path, **environment: str) -> list[str]:
    """What the stand-in printed, launched from this process."""
    with (tmp_path / "output").open("wb") as output:
        assert launch.torchrun(["script.py", "0"], ranks=2, agent="agent", output=output, environment=environment) == 0
    return (tmp_path / "output").read_text().splitlines()


def test_threads_of_ranks_share_the_cores_that_the_process_may_use(agent, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert launched(tmp_path)[1] == "{'OMP_NUM_THREADS': '3'}"
    assert launched(tmp_path, OMP_NUM_THREADS="5")[1] == "{'OMP_NUM_THREADS': '5'}"


def test_a_cluster_and_the_name_of_the_host_have_no_say(agent, tmp_path, monkeypatch) -> None:
    """Kubeflow sets PET_NNODES and others in every pod; a host's name may have no address."""
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "RDZV_BACKEND": "etcd"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    arguments, environment = launched(tmp_path, OMP_NUM_THREADS="1")
    assert environment == "{'OMP_NUM_THREADS': '1'}"
    assert "localhost" not in arguments
    assert "--local-addr=127.0.0.1" in arguments.split()


def answer_signals(ignored: int | None) -> None:
    """Answer all signals but `ignored`, also where these tests were started in the background, which ignores some."""
    for number in launch.ENDING:
        signal.signal(number, signal.SIG_IGN if number == ignored else signal.SIG_DFL)


def signalled(tmp_path: Path, *numbers: Any, again: str = "1", ignored: int | None = None) -> tuple[int, str]:
    """Exit code of a launcher whose group gets signals, and what had been printed by the time of its end."""
    path = tmp_path / "output"
    with path.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, again, "1" if ignored else "60"],
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: answer_signals(ignored),
        )
        try:
            while path.read_text().count("\n") < 2:
                assert process.poll() is None, path.read_text()
                time.sleep(0.01)
            for number in numbers:
                os.killpg(process.pid, number)  # as a terminal and timeout(1) do
                time.sleep(0.05)
            return process.wait(30), "\n".join(path.read_text().splitlines()[2:])
        finally:
            process.kill()


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("HUP", 129), ("INT", 1)])
def test_a_launcher_waits_for_its_ranks(agent, tmp_path, name, code) -> None:
    number = getattr(signal, f"SIG{name}")
    ended, printed = signalled(tmp_path, number, number)  # twice: timeout(1) sends to the process, too
    assert printed.splitlines()[:2] == [f"told SIG{name}", f"ended by SIG{name}"]
    assert printed.count("told") == 1
    assert ended == (-signal.SIGINT if name == "INT" else code)


def test_a_signal_that_is_ignored_stays_so(agent, tmp_path) -> None:
    """SIGHUP under nohup."""
    assert signalled(tmp_path, signal.SIGHUP, ignored=signal.SIGHUP) == (0, "")


def test_a_second_request_reaches_the_ranks_but_no_third(agent, tmp_path) -> None:
    _, printed = signalled(tmp_path, *[signal.SIGINT] * 3, again="0")
    assert printed.count("told SIGINT") == 2
