"""`tp-transformers serve --elastic`: requests outlive ranks; their texts are those of one process."""

import multiprocessing.context
import os
import re
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.features.reshard.distributed.test_reshard_lost import lost_bytes
from tests.features.serve.distributed.test_serve import QUESTIONS, answers, client_of, folder, served, serving
from tests.support.commands import main
from tests.support.models import load
from tests.support.pool import free_port
from tests.support.waiting import until
from tp_transformers.features.elastic import agent
from tp_transformers.features.run.launch import end_with_parent

__all__ = ["folder"]

NEW = 40
WAIT = 300
"""Seconds in which a server says something, on a busy machine too."""
FAULTS = """
import os, signal
from tp_transformers.features.elastic import member
from tp_transformers.features.reshard import moves
with open(os.environ["FAULTS"] + "/pid" + os.environ.get("LOCAL_RANK", ""), "w") as file:
    file.write(str(os.getpid()))
block = moves._block
def faulty(*arguments):
    file = os.environ["FAULTS"] + "/reshard" + os.environ["LOCAL_RANK"]
    if os.path.exists(file):
        os.remove(file)
        os.kill(os.getpid(), signal.SIGKILL)
    return block(*arguments)
moves._block = faulty
free = member.free_memory
member.free_memory = lambda *given: 0 if os.path.exists(os.environ["FAULTS"] + "/full") else free(*given)
"""
"""Imported by ranks, which say their process ids.

One dies at its first move of a reshard, or no rank has memory, while a file says so.
"""


class _AsPopen:
    """A process of multiprocessing with what the command and these tests ask of `subprocess.Popen`."""

    pid: int
    exitcode: int | None
    join: Callable[[float | None], None]

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class _Rank(_AsPopen, multiprocessing.context.ForkProcess):
    """A rank that the server's process forks, instead of a new interpreter: all modules are imported already."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], start_new_session: bool) -> None:
        super().__init__(target=self.run_module, args=(command[2:], env))
        self.start()

    @staticmethod
    def run_module(command: Sequence[str], environment: Mapping[str, str]) -> None:
        os.setsid()
        os.closerange(3, 4096)  # as of a new interpreter: connections of the agent belong to the agent
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [*command]
        sys.modules.pop("tp_faults")  # of the command
        try:
            runpy.run_module(command[0], run_name="__main__")
        except Exception:
            sys.excepthook(*sys.exc_info())
            os._exit(1)


class _Command(_AsPopen, multiprocessing.context.ForkServerProcess):
    """The command, run by a process that is forked where the workers of the pool are."""


def serve_in_forks(arguments: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    """Run in a process: the command, with ranks that are forked."""
    file = os.open(log, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(file, stream)
    end_with_parent()
    os.environ.update(environment)
    agent.subprocess = SimpleNamespace(Popen=_Rank)  # type: ignore[attr-defined]
    sys.exit(main(["serve", *arguments]))


class Server:
    """A server, with its clients."""

    def __init__(self, folder: str, client: Any, process: Any, place: Path) -> None:
        self.folder, self.client, self.process, self.place, self.log = folder, client, process, place, place / "log"
        self.threads = ThreadPoolExecutor(16)

    def text(self, question: str, new: int = NEW) -> tuple[str, float]:
        """The streamed answer, and the longest time between two tokens, in seconds."""
        answer, pause, text = self.stream(question, new), 0.0, ""
        last = time.monotonic()
        for chunk in answer:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            pause, last = max(pause, time.monotonic() - last), time.monotonic()
        return text, pause

    def stream(self, question: str, new: int = NEW) -> Any:
        chat = [{"role": "user", "content": question}]
        return self.client.with_options(max_retries=0).chat.completions.create(
            model=self.folder, messages=chat, temperature=0, max_tokens=new, stream=True
        )

    def ask(self, questions: Sequence[str], new: int = NEW) -> list[Future[tuple[str, float]]]:
        return [self.threads.submit(self.text, question, new) for question in questions]

    def kill(self, *slots: int, by: signal.Signals = signal.SIGKILL) -> None:
        for process in [int((self.place / f"pid{slot}").read_text()) for slot in slots]:
            os.kill(process, by)

    def said(self) -> list[str]:
        """Lines about changes of the ranks."""
        return [line for line in self.log.read_text().splitlines() if "ranks serve after" in line]

    def until(self, count: int, ranks: int) -> str:
        """Wait for `count` changes, one of which, or of later ones, leaves that many ranks; returns the last line."""

        def has_said() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return any(f": {ranks} of " in line for line in self.said()[count - 1 :])

        until(has_said, WAIT, self.log.read_text)
        return self.said()[-1]


@contextmanager
def elastic(folder: str, place: Path, *options: str, by_command: bool = False) -> Iterator[Server]:
    """A server on 3 ranks: each a new interpreter with `by_command`, else forked."""
    (place / "tp_faults.py").write_text(FAULTS)
    environment = {**os.environ, "FAULTS": str(place)}
    given = ["--elastic", "--import", str(place / "tp_faults.py"), *options]
    if by_command:
        with served(folder, 3, given, place / "log", FAULTS=str(place)) as (client, process):
            yield Server(folder, client, process, place)
        return
    (place / "log").touch()
    port = free_port()
    arguments = [folder, "-n", "3", *serving(port), *given]
    command = _Command(target=serve_in_forks, args=(arguments, environment, str(place / "log")))
    command.start()
    try:
        yield Server(folder, client_of(port, command.is_alive), command, place)
    except AssertionError:
        print((place / "log").read_text())
        raise
    finally:
        command.kill()
        command.wait()


def only_of(lost: int, folder: str) -> int:
    """Run on every rank: bytes of the parameters that only one of the ranks holds."""
    return lost_bytes(load(folder), lost)


@pytest.mark.parametrize("by_command", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_costs_a_pause(pool, folder, tmp_path, by_command) -> None:
    """During decode; what only that rank had is read again, and no other byte."""
    texts = answers(folder, new=100)
    lost = pool.run(3, only_of, 1, folder)[0]
    with elastic(folder, tmp_path, "--rejoin", "0", by_command=by_command) as server:
        asked = server.ask(QUESTIONS, 100)
        next(iter(server.stream("w7 w8", 1)))
        server.kill(1)
        given = [answer.result(WAIT) for answer in asked]
        assert [text for text, _ in given] == texts
        line = server.until(1, 2)
        print(line, max(pause for _, pause in given))
        assert "rank 1 ended by SIGKILL: 2 of 3 ranks serve after " in line
        assert int(re.search(r"([\d,]+) bytes read", line)[1].replace(",", "")) == lost > 0
        assert [answer.result(WAIT)[0] for answer in server.ask(QUESTIONS)] == answers(folder, new=NEW)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT) == 128 + signal.SIGTERM
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_ranks_that_are_lost_come_back(folder, tmp_path) -> None:
    """On request, by SIGUSR1; after both were lost at once, the first serves alone."""
    texts = answers(folder, new=NEW)
    with elastic(folder, tmp_path, "--rejoin", "500") as server:
        server.kill(1, 2)
        assert [answer.result(WAIT)[0] for answer in server.ask(QUESTIONS)] == texts
        server.until(1, 1)
        server.process.send_signal(signal.SIGUSR1)
        over = threading.Event()

        def asked() -> list[list[str]]:
            return [[server.text(each)[0] for each in QUESTIONS] for _ in iter(over.is_set, True)]

        running = server.threads.submit(asked)
        assert "has come" in server.until(2, 3)
        over.set()
        assert all(given == texts for given in running.result(WAIT))
        assert [server.text(each)[0] for each in QUESTIONS] == texts


@pytest.mark.slow
def test_a_rank_that_dies_while_resharding(folder, tmp_path) -> None:
    """Rank 2 dies at the first move of the reshard without rank 1."""
    texts = answers(folder, new=NEW)
    with elastic(folder, tmp_path, "--rejoin", "0") as server:
        (tmp_path / "reshard2").touch()
        asked = server.ask(QUESTIONS)
        server.kill(1)
        assert [answer.result(WAIT)[0] for answer in asked] == texts
        line = server.until(1, 1)
        assert "rank 1 ended by SIGKILL; rank 2 ended by SIGKILL: 1 of 3 ranks" in line


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_ended(folder, tmp_path) -> None:
    texts = answers(folder, new=NEW)
    with elastic(folder, tmp_path, "--rejoin", "0", "--watch", "3") as server:
        server.kill(2, by=signal.SIGSTOP)
        asked = server.ask(QUESTIONS)
        assert [answer.result(WAIT)[0] for answer in asked] == texts
        assert re.search("rank 2 (was stopped for 3 s|gave no sign of life): 2 of 3", server.until(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rank 0", "no memory"])
def test_what_cannot_go_on_ends_with_one_error(folder, tmp_path, case) -> None:
    with elastic(folder, tmp_path, "--rejoin", "0") as server:
        if case == "no memory":
            (tmp_path / "full").touch()
        server.kill(0 if case == "rank 0" else 2)
        code = server.process.wait(WAIT)
    said = (tmp_path / "log").read_text()
    assert code == (137 if case == "rank 0" else 2)
    assert said.count("rank 0 ended by SIGKILL" if case == "rank 0" else "the ranks that are left: got") == 1
    assert "Traceback" not in said
