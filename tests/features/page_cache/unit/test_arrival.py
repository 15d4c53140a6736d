"""Reads of shards that wait for bytes on their way into the page cache."""

import threading
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tp_transformers.checkpoint.reading import jobs
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.checkpoint.reading.local_file import LocalFile
from tp_transformers.checkpoint.reading.reader import read
from tp_transformers.errors import CheckpointError
from tp_transformers.features.page_cache import prefetch
from tp_transformers.ranks.group import TensorParallelGroup

GROUP = TensorParallelGroup(None, 0, 1, torch.device("cpu"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_file({"x": torch.arange(4096.0).view(64, 64)}, tmp_path / "x.safetensors")
    return Checkpoint([tmp_path / "x.safetensors"])


def columns(checkpoint: Checkpoint) -> jobs.Request:
    """A shard of columns: many ranges of the file."""
    return jobs.Request(checkpoint.tensors["x"].select(1, [(0, 32)]), torch.empty(64, 32))


def read_prefetched(checkpoint: Checkpoint) -> Collection[str]:
    """Read the shard during its prefetch, and compare; returns the methods by which it was read."""
    request = columns(checkpoint)
    with checkpoint, prefetch.prefetching(checkpoint.opened, [request], GROUP):
        statistics = read([request])
    assert torch.equal(request.destination, torch.arange(4096.0).view(64, 64)[:, :32])
    return statistics.methods


def test_ranges_wait_until_the_bytes_have_been_read(checkpoint, monkeypatch) -> None:
    """The cache seems empty but for headers until the prefetch has run, which starts after the read of the shard."""
    arrived, waits = threading.Event(), threading.Event()
    order: list[str] = []
    fetch, arrival = prefetch.fetch, prefetch.Arrival.__call__

    def seeming(self: LocalFile, spans: list[tuple[int, int]]) -> bool:
        return arrived.is_set() or list(spans) == [(0, 1)]

    def late(file: LocalFile, start: int, stop: int) -> None:
        assert waits.wait(30)
        fetch(file, start, stop)
        order.append("prefetched")
        arrived.set()

    def awaited(self: prefetch.Arrival, start: int, stop: int) -> None:
        waits.set()
        arrival(self, start, stop)
        order.append("read")

    monkeypatch.setattr(LocalFile, "is_resident", seeming)
    monkeypatch.setattr(prefetch, "fetch", late)
    monkeypatch.setattr(prefetch.Arrival, "__call__", awaited)
    assert "map" in read_prefetched(checkpoint), "from the page cache"
    assert order == ["prefetched", "read"]


def test_bytes_that_never_arrive_are_read_all_the_same(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(LocalFile, "is_resident", lambda self, spans: list(spans) == [(0, 1)])
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.01)
    read_prefetched(checkpoint)


def test_a_file_system_that_cannot_tell_is_read_before(checkpoint, monkeypatch) -> None:
    fetched: list[int] = []
    monkeypatch.setattr(LocalFile, "is_resident", lambda self, spans: False)
    monkeypatch.setattr(prefetch, "fetch", lambda file, start, stop: fetched.append(stop - start))
    request = columns(checkpoint)
    with checkpoint, prefetch.prefetching(checkpoint.opened, [request], GROUP) as counts:
        assert sum(fetched) == counts["prefetched"] > 0
        assert all(file is None or file.wait is None for file in checkpoint.opened)


def test_a_disk_that_fails_ends_the_load(checkpoint, monkeypatch) -> None:
    """Also if no shard is read: those in maps would end the process."""

    def fails(file: LocalFile, start: int, stop: int) -> None:
        raise CheckpointError("the disk fails")

    monkeypatch.setattr(prefetch, "fetch", fails)
    context = prefetch.prefetching(checkpoint.opened, [columns(checkpoint)], GROUP, wanted=True)
    with checkpoint, pytest.raises(CheckpointError, match="the disk fails"), context:
        pass
    assert all(file is None or file.wait is None for file in checkpoint.opened)


def test_patience_ends_once(checkpoint, monkeypatch) -> None:
    """Of many reads that wait in vain for another rank, the first uses the time up."""
    (file,) = checkpoint.opened
    looks: list[bool] = []
    monkeypatch.setattr(LocalFile, "is_resident", lambda self, spans: bool(looks.append(True)))
    monkeypatch.setattr(prefetch, "sleep", lambda seconds: None)
    done: Future[None] = Future()
    done.set_result(None)
    arrival = prefetch.Arrival(file, [done])
    arrival(0, 10)
    before = len(looks)
    arrival(10, 20)
    assert len(looks) == before > 100
