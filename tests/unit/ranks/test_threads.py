"""Threads of a rank, on a stand-in for its GPU: the first thing that each does with one is to choose the rank's own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tp_transformers.checkpoint.reading import jobs, memory, reader
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.ranks import mesh
from tp_transformers.ranks.group import TensorParallelGroup
from tp_transformers.seams import Feature, Meet

GPU = torch.device("cuda", 1)


class Device:
    """A device module that computes nothing, and remembers which thread called what."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Any]] = {}

    def called(self, what: Any) -> None:
        self.calls.setdefault(threading.current_thread().name, []).append(what)

    def set_device(self, device: Any) -> None:
        self.called(("set_device", device))

    def Stream(self, *arguments: Any) -> Any:  # noqa: N802
        self.called("Stream")
        return mock.Mock()

    def Event(self) -> Any:  # noqa: N802
        event = mock.Mock()
        event.synchronize.side_effect = lambda: self.called("synchronize")
        event.record.side_effect = lambda stream: self.called("record")
        return event

    def current_stream(self, device: Any) -> Any:
        self.called("current_stream")
        return mock.Mock()

    def stream(self, stream: Any) -> Any:
        self.called("stream")
        return contextlib.nullcontext()

    def of_others(self) -> dict[str, list[Any]]:
        """The calls of threads that are not the main one."""
        return {name: calls for name, calls in self.calls.items() if name != threading.main_thread().name}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    return device


@pytest.fixture
def group(device: Device, monkeypatch: pytest.MonkeyPatch) -> TensorParallelGroup:
    """A group of two ranks on GPUs, the other of which does as this one does."""

    def gather(self: TensorParallelGroup, value: Any) -> list[Any]:
        device.called("gather")
        return [value, value]

    monkeypatch.setattr(TensorParallelGroup, "_gather", gather)
    return TensorParallelGroup(None, 0, 2, GPU)


def test_threads_that_read(device, tmp_path, monkeypatch) -> None:
    save_file({"x": torch.arange(4096.0)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(jobs, "JOB_BYTES", 1 << 10)
    empty: Callable[..., Any] = torch.empty
    monkeypatch.setattr(memory.torch, "empty", lambda *sizes, pin_memory=False, **kind: empty(*sizes, **kind))
    with Checkpoint([tmp_path / "x.safetensors"]) as checkpoint:
        away = torch.empty(4096, device="meta")
        reader.read([jobs.Request(checkpoint.tensors["x"], away)], threads=3)
    readers = device.of_others()  # a thread without a job calls nothing
    assert readers
    assert readers.keys() <= {"read_0", "read_1", "read_2"}
    assert all(calls[0] == ("set_device", away.device) for calls in readers.values())


def test_threads_that_meet(device, group) -> None:
    ran = group.together(lambda: threading.current_thread())
    assert ran is threading.main_thread(), "where signals arrive"
    (calls,) = device.of_others().values()
    assert calls[:2] == [("set_device", GPU), "gather"]


def test_a_thread_that_cannot_have_the_device_is_an_error(device, group, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(device, "set_device", mock.Mock(side_effect=RuntimeError("no device")))
    with pytest.raises(RuntimeError):
        group.together(lambda: None)


def test_the_process_group_has_a_backend_for_the_cpu_beside_that_for_gpus(device, monkeypatch) -> None:
    """FSDP2 with CPU offload gathers what is on the CPU."""
    started: list[tuple[Any, ...]] = []
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "set_device", lambda gpu: started.append(("set_device", gpu)))
    monkeypatch.setattr(device, "device_count", lambda: 2, raising=False)
    monkeypatch.setattr(device, "current_device", lambda: 0, raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, store, **named: started.append((*given, named)))
    monkeypatch.setattr(mesh, "meet", lambda url, rank, world_size, **_: iter([(dist.HashStore(), rank, world_size)]))

    class Connecting(Feature):
        def around_start(self) -> AbstractContextManager[Meet]:
            return nullcontext(lambda store, *own: started.append(("connect_machines", *own)) or store)

    monkeypatch.setattr(mesh, "features", lambda: {"": Connecting()})
    monkeypatch.setattr(mesh, "check_gpus", lambda store, *own: started.append(("check_gpus", *own)))
    monkeypatch.setattr(mesh.atexit, "register", lambda function: None)
    assert mesh._start_process_group() == "cuda"
    place = {"device_id": GPU if torch.__version__ >= (2, 10) else None, "rank": 3, "world_size": 4}  # type: ignore[operator]
    before = [("set_device", GPU), ("connect_machines", 3, 4), ("check_gpus", 3, 4, GPU)]
    assert started == [*before, ("cpu:gloo,cuda:nccl", place)]
    backend = started[-1][0]
    config = dist.distributed_c10d.BackendConfig(dist.Backend(backend))
    assert config.get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}
    # A group that runs, of whichever of both forms, is one for GPUs; one of gloo alone is not.
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for name, kind in ((backend, "cuda"), ("nccl", "cuda"), ("gloo", "cpu")):
        running = str(dist.distributed_c10d.BackendConfig(dist.Backend(name)))
        monkeypatch.setattr(dist, "get_backend_config", lambda running=running: running)
        assert mesh._start_process_group() == kind
