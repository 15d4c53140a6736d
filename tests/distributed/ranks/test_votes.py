"""Ranks that fail together: a fault on one rank, wherever it is, ends the same block on all, with one error."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import pytest

from tp_transformers.ranks import group as group_module
from tp_transformers.ranks.group import TensorParallelGroup
from tp_transformers.ranks.mesh import join

pytestmark = pytest.mark.distributed


def fail(where: str, slow: int | None = None) -> list[str]:
    """Run on every rank: all kinds of votes in a row, of which the last rank does not get past `where`."""
    group, passed = join(), []

    def step(name: str) -> str:
        if group.rank == group.size - 1 and name == where:
            raise ValueError(f"in {name}")
        if group.rank == slow and name == "a job":
            time.sleep(1)
        passed.append(name)
        return name

    def jobs(group: TensorParallelGroup) -> None:
        assert group.everywhere(lambda: step("a value")) == ["a value"] * group.size
        step("between")
        assert group.together(lambda: step("a job")) == "a job"
        step("after")
        assert group.first_on_node(lambda first: step("a node")) == "a node"
        with group.agree():
            step("a block")
        step("later")
        group.check_same({"a subject": step("the same")})

    with mock.patch.object(group_module, "HEARTBEAT", 0.2):
        try:
            with group.agree():
                step("before")
                jobs(group)
        except Exception as error:
            return [*passed, f"{type(error).__name__}: {error}"]
    return passed


ALL = ["before", "a value", "between", "a job", "after", "a node", "a block", "later", "the same"]


def fail_everywhere() -> dict[str, list[str]]:
    return {where: fail(where) for where in ALL}


def test_a_fault_on_one_rank_is_the_same_error_on_all(pool: Any) -> None:
    """And the next vote is as if nothing had been."""
    for each in pool.run(3, fail_everywhere, timeout=60):
        for where, found in each.items():
            assert found[-1] == f"RemoteRankError: rank 2: ValueError: in {where}"
            assert found[:-1] == ALL[: len(found) - 1]
            assert len(found) <= ALL.index(where) + 3, "ranks went on"


def test_a_rank_that_is_busy_ends_its_job_before_it_hears_of_a_fault(pool: Any) -> None:
    found = pool.run(2, fail, "between", 0, timeout=60)
    assert found[0][-2:] == ["a job", "RemoteRankError: rank 1: ValueError: in between"]
    assert found[1][-1] == found[0][-1]


def without_threads() -> str:
    """Run on every rank: the last one can start no thread."""
    group = join()
    last = group.rank == group.size - 1
    start: Any = mock.Mock(side_effect=RuntimeError("can't start new thread")) if last else threading.Thread.start
    with mock.patch.object(threading.Thread, "start", start):
        try:
            group.together(lambda: None)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_can_start_no_thread_is_an_error_on_all(pool: Any) -> None:
    found = pool.run(2, without_threads, timeout=60)
    assert found == ["RemoteRankError: rank 1: RuntimeError: can't start new thread"] * 2


def interrupted() -> str:
    """Run on every rank: the last one is interrupted in its job."""
    group = join()

    def job() -> None:
        if group.rank == group.size - 1:
            raise KeyboardInterrupt

    try:
        group.together(job)
    except BaseException as error:
        return type(error).__name__
    return ""


def test_a_rank_that_is_interrupted_leaves_no_other_waiting(pool: Any) -> None:
    assert pool.run(2, interrupted, timeout=60) == ["RemoteRankError", "KeyboardInterrupt"]
