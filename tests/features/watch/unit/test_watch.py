"""The watch of a rank: a store that is gone, a GPU that fails, the thread that polls, connections that are shut."""

import gc
import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tp_transformers.features.watch import renew
from tp_transformers.features.watch.calls import WATCHED_CALLS
from tp_transformers.features.watch.device import Steps
from tp_transformers.features.watch.failure import lost
from tp_transformers.features.watch.poller import POLLER, Poller
from tp_transformers.features.watch.sockets import shut
from tp_transformers.features.watch.watch import Watch
from tp_transformers.patches import Patch
from tp_transformers.ranks.group import TensorParallelGroup


def watch_on(device: str) -> Watch:
    """A watch with a pending error, on the first of two ranks."""
    watch = object.__new__(Watch)
    watch.__dict__.update(
        group=TensorParallelGroup(None, 0, 2, torch.device(device)),
        process_group=mock.Mock(),
        failure=None,
        limit=10.0,
        _store=mock.Mock(**{"add.side_effect": RuntimeError("connection reset")}),
        _error=ValueError("of a forward, which waits to be told"),
        steps=Steps(torch.device(device)),
        _concluded=threading.Event(),
        _links={},
        _round=0,
        _began=None,
        _depth=0,
        _unreachable_at=None,
    )
    return watch


def test_the_verdict_is_known_where_every_call_of_the_gpu_raises(monkeypatch) -> None:
    """After an illegal access, each call of CUDA returns its error again, and so does the choice of the device."""
    watch = watch_on("cuda:0")
    broken = mock.Mock(**{"set_device.side_effect": torch.AcceleratorError("an illegal memory access")})
    monkeypatch.setattr(torch, "get_device_module", lambda kind: broken)
    with mock.patch.object(POLLER, "all", return_value=[watch]):
        watch.conclude(lost(1, 10))
    assert watch.failure is not None
    assert watch._concluded.is_set(), "the thread that failed waits for it"


def test_a_store_that_is_gone_is_not_asked_again_and_again() -> None:
    watch = watch_on("cpu")
    assert watch.is_urgent
    with mock.patch.object(POLLER, "all", return_value=[watch]):
        watch.poll()
    assert watch.failure is not None
    assert watch._concluded.is_set()
    assert not watch.is_urgent  # else the thread polls 200 times a second as long as the model lives
    watch.poll()
    assert watch._store.add.call_count == 1


def test_a_group_may_end_while_a_verdict_is_being_decided() -> None:
    """By another thread: elastic serving hears from its agent that the ranks change."""
    watch, ended = watch_on("cpu"), lost(1, 10)
    watch.group.__dict__["global_ranks"] = [0, 1]
    watch._store, watch._waits = dist.HashStore(), mock.Mock()
    watch._collectives, watch._entered = lambda: 0, 0  # type: ignore[method-assign]
    looked: list[None] = []

    def beats() -> list[int]:
        looked.append(None)
        if len(looked) == 2:
            watch.conclude(ended)
        return [len(looked), len(looked)]

    watch._beats = beats  # type: ignore[method-assign]
    with mock.patch.object(POLLER, "all", return_value=[watch]):
        watch.poll()
    assert len(looked) == 2
    assert watch.failure is ended


def test_ranks_load_without_a_watch_on_steps(monkeypatch) -> None:
    patch = WATCHED_CALLS[1]
    monkeypatch.setattr(patch, "missing", "")
    monkeypatch.delattr(torch.optim.Optimizer, "profile_hook_step")
    made = Patch(patch.owner, patch.name, patch._install, without=patch.without)
    made.hold_for(nn.Module())
    assert "profile_hook_step" in made.missing


@pytest.mark.parametrize(("release", "binds"), [("2.8.0", False), ("2.9.1", False), ("2.10.0", True), ("2.13.0", True)])
def test_a_renewed_group_is_bound_to_its_gpu_where_torch_can_split_it(monkeypatch, release, binds) -> None:
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(release))
    started: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, device_id, **__: started.append(device_id))
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(renew, "prepare", lambda *own: None)
    group = SimpleNamespace(device=device, device_mesh=object(), process_group=object())
    renew._restart(group, dist.HashStore())  # type: ignore[arg-type]
    assert started == [device if binds else None]


class Counted:
    """What is polled, without a model."""

    is_urgent = False

    def poll(self) -> None:
        """Nothing to look at."""


def test_what_is_added_again_is_polled_once_and_bids_its_last_farewell() -> None:
    poller, polled, farewells = Poller(), Counted(), list[str]()
    try:
        for number in range(3):
            poller.add(polled, lambda number=number: farewells.append(str(number)))
        assert poller.all() == [polled]
        del polled
        gc.collect()
    finally:
        poller._stop()
    assert farewells == ["2"]


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    """One end of a TCP connection, the other end of which lives."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
        server.accept()[0],
    ):
        yield connection


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_descriptor_that_becomes_a_file_is_left_alone(connected, tmp_path, monkeypatch) -> None:
    """Gloo closes its connections in threads of its own, and others open files then."""
    duplicated, found = os.dup, {connected.fileno(): (connected.getsockname(), connected.getpeername())}
    with (tmp_path / "file").open("w") as file:

        def dup(descriptor: int) -> int:
            copied = duplicated(descriptor)
            os.dup2(file.fileno(), connected.fileno())
            return copied

        before = descriptors()
        monkeypatch.setattr(os, "dup", dup)
        shut(found)
        shut(found)
        assert descriptors() == before


def test_a_connection_is_shut_once(connected) -> None:
    found = {connected.fileno(): (connected.getsockname(), connected.getpeername())}
    shut(found)
    assert connected.recv(1) == b""
    shut(found)
