"""Files that fail while they are read, memory that stays bounded, and ways to read that cost what they are said to."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tp_transformers import CheckpointError
from tp_transformers.checkpoint.reading import jobs, memory
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.checkpoint.reading.jobs import Request
from tp_transformers.checkpoint.reading.local_file import LocalFile
from tp_transformers.checkpoint.reading.reader import read
from tp_transformers.checkpoint.reading.report import LoadReport
from tp_transformers.slices.stored import Stored


def columns(checkpoint: Checkpoint) -> Request:
    """The right half of every row of `big`."""
    tensor = checkpoint.tensors["x"].select(1, [(2048, 4096)])
    return Request(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))


@pytest.mark.parametrize("method", ["contiguous", "blocks", "reads"])
def test_an_io_error_stops_all_threads(big, method, monkeypatch) -> None:
    checkpoint, _, _ = big
    monkeypatch.setattr(jobs, "JOB_BYTES", 1 << 16)
    monkeypatch.setattr(LocalFile, "is_resident", lambda file, spans: False)
    monkeypatch.setattr(jobs, "cheapest", lambda block, may_map: method)
    preadv, calls = os.preadv, []

    def failing(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        calls.append(offset)
        if len(calls) == 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", failing)
    tensor = checkpoint.tensors["x"]
    request = columns(checkpoint) if method != "contiguous" else Request(tensor, torch.empty(1024, 4096).short())
    with pytest.raises(CheckpointError, match=r"model\.safetensors: reading at byte \d+ failed: Input/output error"):
        read([request], threads=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]
    monkeypatch.undo()
    read([request], threads=3)  # the file is still open and good
    assert torch.equal(request.destination, tensor.materialize()[:, 4096 - request.destination.shape[1] :])


def test_neighbours_make_jobs_of_at_most_so_many_bytes(big, monkeypatch) -> None:
    checkpoint, _, values = big
    monkeypatch.setattr(jobs, "JOB_BYTES", 3 * values[0].nbytes)
    rows = [checkpoint.tensors["x"].select(0, [(row, row + 1)]) for row in range(8)]
    made = list(jobs.order([Request(row, torch.empty(1, 4096, dtype=torch.int16)) for row in rows]))
    assert [job.nbytes for job in made] == [3 * values[0].nbytes] * 2 + [2 * values[0].nbytes]


def test_nothing_is_read_into_empty_buffers(big) -> None:
    _, path, _ = big
    with LocalFile(path) as file:
        assert file.read_bytes(0, 0) == b""
        assert file.reads == 0


def test_torch_keeps_its_threads(big) -> None:
    checkpoint, _, _ = big
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        read([columns(checkpoint)], threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def rewritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"?")


def truncated(path: Path) -> None:
    os.truncate(path, 10)


@pytest.mark.parametrize("change", [replaced, rewritten, truncated, Path.unlink])
def test_a_file_that_changes_is_noticed(big, change) -> None:
    checkpoint, path, _ = big
    (source,) = checkpoint.sources
    source.check_unchanged()
    change(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: got another file"):
        source.check_unchanged()


def test_residence(big) -> None:
    """Bytes that were just written are in memory; a file system that does not say counts as cold."""
    checkpoint, _, _ = big
    (source,) = checkpoint.sources
    source.read_bytes(0, source.size)
    assert source.is_resident([(0, source.size)])


def test_a_file_system_in_memory(tmp_path) -> None:
    """tmpfs says nothing of single pages, and has all of them in memory; a disk is not mistaken for it."""
    shared = Path("/dev/shm")
    if f" {shared} " not in Path("/proc/self/mounts").read_text():
        pytest.skip("no tmpfs is mounted here")
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        save_file({"x": torch.arange(40).view(4, 10)}, Path(folder) / "model.safetensors")
        with Checkpoint([Path(folder) / "model.safetensors"]) as checkpoint:
            assert checkpoint.sources[0].is_resident([(0, 100)])
            tensor = checkpoint.tensors["x"].select(1, [(2, 5)])
            request = Request(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))
            assert read([request]).methods.keys() == {"map"}
            assert torch.equal(request.destination, torch.arange(40).view(4, 10)[:, 2:5])


def test_a_file_system_that_does_not_tell(big, monkeypatch) -> None:
    checkpoint, _, values = big
    preadv = os.preadv

    def without_flags(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "no")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(LocalFile, "_is_in_memory", False)
    monkeypatch.setattr(os, "preadv", without_flags)
    request = columns(checkpoint)
    assert read([request]).methods.keys() == {"blocks"}
    assert torch.equal(request.destination, values[:, 2048:])


def test_the_way_that_was_measured_to_be_fast_is_chosen() -> None:
    rows = re.findall(r"^ +([\d,]+) of +([\d,]+)((?: +[\d.]+){3})$", jobs.__doc__ or "", re.MULTILINE)
    assert len(rows) == 7
    for run, stride, rates in rows:
        block = made_of(int(run.replace(",", "")), int(stride.replace(",", "")))
        measured = dict(zip(("reads", "blocks", "map"), map(float, rates.split()), strict=True))
        assert jobs.cheapest(block, may_map=True) == max(measured, key=measured.__getitem__) == "map"
        # Of two ways that take about as long, either will do.
        cold = jobs.cheapest(block, may_map=False)
        assert measured[cold] > 0.85 * max(measured["reads"], measured["blocks"])


def made_of(run: int, stride: int) -> Stored:
    matrix = Stored(None, offset=0, shape=((256 << 20) // stride, stride), dtype=torch.uint8)  # type: ignore[arg-type]
    return matrix.select(1, [(0, run)])


def test_few_bytes_of_long_rows_are_read_alone() -> None:
    for may_map in (False, True):
        assert jobs.cheapest(made_of(8192, 1 << 20), may_map=may_map) == "reads"


@pytest.mark.parametrize("slow", [0.0, 1.0])
def test_pages_that_are_cleared_hold_what_they_are_filled_with(slow, monkeypatch) -> None:
    """Whether huge pages come fast or not; and clearing memory that holds values already leaves them."""
    monkeypatch.setattr(memory, "_SLOW", slow)
    pages = memory.Pages()
    tensor = memory.empty((3 << 20, 3), torch.int8, torch.device("cpu"))
    assert (tensor.shape, tensor.dtype) == ((3 << 20, 3), torch.int8)
    for part in tensor.chunk(3):
        pages.clear(part)
        part.fill_(5)
    pages.clear(tensor)
    pages.clear(tensor.t())
    assert (tensor == 5).all()
    assert pages._huge_are_fast is (slow > 0)


def test_a_source_is_opened_once_and_closed(big) -> None:
    checkpoint, path, _ = big

    def opened() -> int:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum(os.path.realpath(link) == str(path) for link in links)

    assert opened() == 1
    read([columns(checkpoint)], threads=2)
    mapped = Path("/proc/self/maps").read_text().count(str(path))
    assert (opened(), mapped) == (2, 1), "the map holds the file by a descriptor of its own"
    checkpoint.close()
    assert opened() == 0
    assert str(path) not in Path("/proc/self/maps").read_text()
    with LocalFile(path) as source:
        assert source.size == path.stat().st_size


def test_a_file_larger_than_all_memory_is_mapped(tmp_path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 42)
    with LocalFile(tmp_path / "sparse") as source:
        assert torch.equal(source.pages(1 << 41, 3), torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(600, 70), (3, 300, 20), (1, 5), (5, 1), (7,), (2, 3, 4, 5), (0, 4)])
def test_copies_into_any_strides(shape, dtype) -> None:
    values = torch.randn(shape).bfloat16()
    wide = torch.cat([values, values], -1).narrow(-1, 0, shape[-1])
    for source in (values, wide):
        for first in range(len(shape)):
            for second in range(len(shape)):
                destination = torch.empty(values.transpose(first, second).shape, dtype=dtype).transpose(first, second)
                memory.copy(source, destination)
                assert torch.equal(destination, values.to(dtype))


class LateDevice:
    """Stands in for a GPU: copies are made when somebody waits for them, from what the buffers hold by then."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.waits: list[str] = []

    def copy(self, values: torch.Tensor, destination: torch.Tensor) -> None:
        with self.lock:
            self.queue.append((values, destination))

    def run_until(self, count: int) -> None:
        with self.lock:
            for values, destination in self.queue[self.done : count]:
                destination.copy_(values)
            self.done = max(self.done, count)

    def module(self) -> Any:
        device = self

        class Stream:
            def __init__(self, *arguments: Any) -> None:
                pass

            def wait_stream(self, other: Any) -> None:
                device.waits.append("side waits" if isinstance(other, str) else "current waits")

        class Current(str):
            def wait_stream(self, other: Any) -> None:
                device.waits.append("current waits")

        class Event:
            count = 0

            def record(self, stream: Any) -> None:
                with device.lock:
                    self.count = len(device.queue)

            def synchronize(self) -> None:
                device.run_until(self.count)

        class Module:
            pass

        module: Any = Module()
        module.Stream, module.Event = Stream, Event
        module.current_stream = lambda of: Current("current")
        module.stream = lambda stream: contextlib.nullcontext()
        return module


@pytest.mark.parametrize("threads", [1, 4])
def test_buffers_are_used_again_only_when_their_copies_are_made(big, threads, monkeypatch) -> None:
    checkpoint, _, values = big
    device = LateDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device.module())
    monkeypatch.setattr(memory, "copy", device.copy)
    monkeypatch.setattr(LocalFile, "is_resident", lambda file, spans: False)
    monkeypatch.setattr(jobs, "JOB_BYTES", 1 << 18)
    tensor = checkpoint.tensors["x"]
    whole = torch.empty(tensor.shape, dtype=torch.float32)
    turned = torch.empty(tensor.shape[::-1], dtype=tensor.dtype).t()
    statistics = read([Request(tensor, whole), Request(tensor, turned)], threads=threads)
    assert torch.equal(whole, values.float())
    assert torch.equal(turned, values)
    assert statistics.peak_buffer == (threads + 1) * (1 << 18)
    assert len(device.queue) == device.done == 2 * tensor.nbytes >> 18
    assert device.waits == ["side waits", "current waits"]


def test_a_file_that_is_written_to_while_it_is_mapped(big, monkeypatch) -> None:
    checkpoint, path, _ = big

    def writing(*tensors: torch.Tensor) -> None:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        memory.copy(*tensors)

    monkeypatch.setattr(jobs, "copy", writing)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: got another file, or other contents"):
        read([columns(checkpoint)], threads=2)


def test_a_report_names_small_sizes_too() -> None:
    report = LoadReport(1, (1_500_000_000, 287_430_000), 0.5, 0.4, 287_431_000, 9, peak_buffer=0, mapped=2_000)
    said = str(report)
    assert said.startswith("rank 1 of 2: 287.4 MB in 0.50 s (0.6 GB/s); read 287.4 MB in 9 reads")
    assert said.endswith("buffers 0; shares 1.50 GB, 287.4 MB; mapped 2.0 kB")


def test_a_report_names_the_split_and_its_reason() -> None:
    report = LoadReport(0, (8, 4), 0.5, 0.4, 8, 1, tp_shares=(2, 1), shares_because="memory")
    assert str(report).endswith("; split 2 : 1 (memory)")
    assert "split" not in str(LoadReport(0, (8, 4), 0.5, 0.4, 8, 1))
