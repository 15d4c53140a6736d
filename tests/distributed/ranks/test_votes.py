"""Ranks that fail together: a fault on one rank, wherever it is, ends the same block on all, with one error."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import pytest

from tests.support.on_ranks import on_ranks
from tp_transformers.errors import RemoteRankError
from tp_transformers.ranks import group as group_module
from tp_transformers.ranks.group import TensorParallelGroup
from tp_transformers.ranks.mesh import join


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


@on_ranks(3)
def test_a_fault_on_one_rank_is_the_same_error_on_all() -> None:
    """And the next vote is as if nothing had been."""
    for where in ALL:
        *passed, error = fail(where)
        assert error == f"RemoteRankError: rank 2: ValueError: in {where}"
        assert passed == ALL[: len(passed)]
        assert len(passed) <= ALL.index(where) + 2, "ranks went on"


def test_a_rank_that_is_busy_ends_its_job_before_it_hears_of_a_fault(pool) -> None:
    found = pool.run(2, fail, "between", 0, timeout=60)
    assert found[0][-2:] == ["a job", "RemoteRankError: rank 1: ValueError: in between"]
    assert found[1][-1] == found[0][-1]


@on_ranks(2)
def test_a_rank_that_can_start_no_thread_is_an_error_on_all() -> None:
    group = join()
    last = group.rank == group.size - 1
    start: Any = mock.Mock(side_effect=RuntimeError("can't start new thread")) if last else threading.Thread.start
    with (
        mock.patch.object(threading.Thread, "start", start),
        pytest.raises(RemoteRankError, match=r"^rank 1: RuntimeError: can't start new thread$"),
    ):
        group.together(lambda: None)


@on_ranks(2)
def test_a_rank_that_is_interrupted_leaves_no_other_waiting() -> None:
    group = join()
    last = group.rank == group.size - 1

    def job() -> None:
        if last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if last else RemoteRankError):
        group.together(job)
