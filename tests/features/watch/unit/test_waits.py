"""What a rank that waits in a collective tells, with a store and places of the test's own."""

import json
import logging
import threading
from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from tests.features.watch.unit.test_failure import report
from tp_transformers.features.places import place
from tp_transformers.features.places.place import _LIBRARIES, _OWN, Place, _call, _Frame, here
from tp_transformers.features.watch import waits
from tp_transformers.features.watch.failure import Failure, judge
from tp_transformers.features.watch.waits import PATIENCE, Waits, beat_of
from tp_transformers.ranks.group import TensorParallelGroup

SAVES = Place("save_pretrained", True, "train.py:12: model.save_pretrained(folder)")
GENERATES = Place("generate", True, "train.py:14: model.generate(ids)")
SLEEPS = Place("", False, "train.py:20: time.sleep(60)")
BARRIER = Place("", True, "train.py:21: dist.barrier()")


def run(own: Place, others: list[Place | None], seconds: float, *, world: int = 0, silent: int = 0) -> Failure | None:
    """The verdict of rank 0 after so many seconds, polled twice a second, `silent` of which is dead."""
    store, size = HashStore(), len(others) + 1
    group = TensorParallelGroup(None, 0, size, torch.device("cpu"))
    with (
        mock.patch.object(TensorParallelGroup, "global_ranks", list(range(size))),
        mock.patch.object(dist, "get_world_size", return_value=world or size),
        mock.patch.object(waits, "here", return_value=own),
    ):
        looking = Waits(group, store)
        for rank, other in enumerate(others, 1):
            store.set(f"place {rank}", json.dumps(asdict(other)) if other else "")
        for half in range(int(2 * seconds) + 1):
            for rank in range(1, size):
                store.add(beat_of(rank), int(rank != silent or half < 3))
            verdict = looking.look(half / 2, 7)
            if verdict is not None:
                return verdict
    return None


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_it_tells_who_is_elsewhere_and_again_more_seldom(caplog) -> None:
    assert run(SAVES, [SLEEPS, SAVES], 7.9 * PATIENCE) is None
    assert [message.partition(" has waited ")[2].split(" s ")[0] for message in told(caplog)] == ["10", "20", "40"]
    assert told(caplog)[0] == (
        "save_pretrained (train.py:12: model.save_pretrained(folder)) has waited 10 s for rank 1, which has not "
        "called it: rank 1 is alive, at train.py:20: time.sleep(60). All ranks of a model have to call it."
    )


@pytest.mark.parametrize(
    ("own", "others", "options"),
    [
        (SAVES, [SAVES], {}),  # it computes, or sends, for as long as it likes
        (SAVES, [Place("save_pretrained", False, "train.py:12: ...")], {}),
        (SAVES, [None], {}),  # it begins collectives
        (SAVES, [SLEEPS], {"silent": 1}),  # it was killed or stopped, which the watch finds out
        (SLEEPS, [SAVES], {}),  # the other rank tells
        (BARRIER, [SLEEPS], {}),  # a collective of the user's own
    ],
)
def test_it_tells_of_nothing_else(own, others, options, caplog) -> None:
    assert run(own, others, 3 * PATIENCE, **options) is None
    assert not told(caplog)


@pytest.mark.parametrize("other", [BARRIER, GENERATES])
def test_different_calls_in_which_all_wait_are_an_error(other, caplog) -> None:
    verdict = run(SAVES, [SAVES, other], 1.5 * PATIENCE)
    assert verdict.rank == 2
    assert verdict.is_of_all
    assert verdict.text.startswith("has not called save_pretrained: it waits in ")
    assert other.line in verdict.text
    assert not told(caplog)


@pytest.mark.parametrize(
    ("others", "options"),
    [
        ([BARRIER, SLEEPS], {}),  # the last one may come to both
        ([BARRIER, None], {}),
        ([BARRIER], {"world": 4}),  # others of the barrier may come late
    ],
)
def test_who_may_still_come_ends_nothing(others, options, caplog) -> None:
    assert run(SAVES, others, 1.5 * PATIENCE, **options) is None
    assert len(told(caplog)) == 1


def test_a_place_is_the_line_of_the_users_own_code() -> None:
    found: list[Place] = []

    def look() -> None:
        found.append(here())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found[0].call == ""
    assert not found[0].waits
    assert found[0].line.startswith("test_waits.py:")
    assert found[0].line.endswith((": thread.start()", ": thread.join()"))


def test_a_private_function_goes_by_the_call_of_the_library_around_it() -> None:
    user = _Frame("__main__", "<module>", "/home/me/train.py", 3)
    start = _Frame("runpy", "_run_code", f"{_LIBRARIES[0]}/runpy.py", 1)
    outer, inner = (_Frame("safetensors.torch", name, f"{_LIBRARIES[2]}/s.py", 1) for name in ("save_file", "_flatten"))
    patched, private = (
        _Frame(f"tp_transformers.{module}", name, f"{_OWN}/x.py", 1)
        for module, name in (("patches", "patched"), ("strategies", "_bytes_of"))
    )
    wait = _Frame("torch.distributed.distributed_c10d", "all_gather", f"{_LIBRARIES[2]}/d.py", 1)
    assert _call([start, user, outer, inner, patched, private, wait][::-1]) == "save_file"
    assert _call([start, user, patched, private, wait][::-1]) == "_bytes_of"
    assert _call([start, user, outer, private._replace(function="generate"), wait][::-1]) == "generate"


def test_no_thread_runs_while_its_frames_are_read(monkeypatch) -> None:
    """torch.compile frees frames that another thread still reads."""
    count, calls, read = 0, 10, place._read
    seen: list[set[int]] = []

    def slowly(frame: Any) -> Any:
        seen[-1].add(count)
        sum(range(2000))  # all frames together take longer than Python's usual interval
        return read(frame)

    def look() -> None:
        for _ in range(calls):
            seen.append(set())
            here()

    def go_on(depth: int) -> None:
        nonlocal count
        if depth:
            return go_on(depth - 1)
        while thread.is_alive():
            count += 1

    monkeypatch.setattr(place, "_read", slowly)
    thread = threading.Thread(target=look)
    thread.start()
    go_on(600)
    thread.join()
    assert [len(counts) for counts in seen].count(1) > calls // 2  # a busy machine may stop the reader for longer


def test_a_rank_that_has_ended_was_not_killed() -> None:
    gone = judge({0: report(1, follows=True)}, [5, -9], [7, -9], 4.0, [0, 1])
    stopped = judge({0: report(1, follows=True)}, [5, 9], [7, 9], 4.0, [0, 1])
    assert gone.text.startswith("has ended, or no longer holds the model")
    assert stopped.text.startswith("gave no sign of life for 4 s")


@pytest.fixture(autouse=True)
def _levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
