"""The watch of a rank whose store has gone."""

from __future__ import annotations

import threading
from unittest import mock

import torch

from tp_transformers.ranks.group import TensorParallelGroup
from tp_transformers.ranks.watching.poller import POLLER
from tp_transformers.ranks.watching.watch import Watch


def test_a_store_that_is_gone_is_not_asked_again_and_again() -> None:
    watch = object.__new__(Watch)
    watch.__dict__.update(
        group=TensorParallelGroup(None, 0, 1, torch.device("cpu")),
        process_group=mock.Mock(),
        failure=None,
        limit=10.0,
        _store=mock.Mock(**{"add.side_effect": RuntimeError("connection reset")}),
        _error=ValueError("of a forward, which waits to be told"),
        _concluded=threading.Event(),
        _links={},
        _round=0,
        _began=None,
        _depth=0,
        _unreachable_at=None,
    )
    assert watch.is_urgent
    with mock.patch.object(POLLER, "all", return_value=[watch]):
        watch.poll()
    assert watch.failure is not None
    assert watch._concluded.is_set()
    assert not watch.is_urgent  # else the thread polls 200 times a second as long as the model lives
    watch.poll()
    assert watch._store.add.call_count == 1
