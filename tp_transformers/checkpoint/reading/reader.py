"""Slice requests -> reads in file order -> the memory that the parameters will live in.

All requests are known before the first byte is read. They are cut into boxes of the files, and these into jobs of a few
MiB that threads take in file order. Where the file's bytes are the destination's in the same order, they are read
straight into place, and neighbours of the file by one call, whatever tensors they belong to. Rows are read in the way
that `costs` finds cheapest. What is in the page cache can be copied out of a memory map into any strides and dtype;
anything else that is on another device, of another dtype or not contiguous goes through one of a few staging buffers.
Bytes that no rank needs are read only between the rows of a block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from queue import Empty, SimpleQueue
from time import perf_counter

import torch

from ...errors import CheckpointError
from ...ranks.group import bind_thread
from ...slices.stored import Box, Stored, byte_view
from .costs import BLOCK_BYTES, cheapest
from .file_map import handle_signals, may_map, survive_truncation
from .memory import Pages, Staging, copy
from .source import LocalFile, Source

JOB_BYTES = 16 << 20
"""What one thread reads at a time: enough to make a call and a copy to a device cheap, little enough to share the work
and to bound the staging buffers, which are as large."""

_BUFFERS_A_CALL = 512

_POLL_SECONDS = 0.05
"""How often the main thread looks up from waiting, to handle signals."""


@dataclass(frozen=True)
class Request:
    """Read `tensor` into `destination`: of the same shape, but of any strides, device and dtype to cast to."""

    tensor: Stored
    destination: torch.Tensor


@dataclass
class Method:
    """What was read in one way."""

    nbytes: int = 0
    """Bytes that ended in destinations."""
    copied: int = 0
    """Bytes that came into memory, which for whole rows is more."""
    seconds: float = 0.0
    """Summed over threads."""


@dataclass
class Statistics:
    """What a call of `read` did."""

    methods: dict[str, Method] = field(default_factory=dict)
    """`contiguous`, and the ways of `costs`."""
    seconds: float = 0.0
    threads: int = 1
    peak_buffer: int = 0
    """Bytes of all buffers that are not destinations."""


def read(
    requests: Iterable[Request], *, threads: int = 1, progress: Callable[[int], object] = lambda nbytes: None
) -> Statistics:
    """Fill the destinations of all `requests`; `progress` is called with byte counts as they arrive.

    Destinations may be on CPUs and on one other device, which has finished its copies on return.

    Raises CheckpointError where a file is shorter than its header says, cannot be read, or changes meanwhile.
    """
    began = perf_counter()
    statistics = Statistics(threads=threads)
    pieces = [piece for request in requests for piece in _pieces(request)]
    pieces.sort(key=lambda piece: (piece.box.source.name, piece.box.offset))
    with ExitStack() as stack:
        mapped = _mapped(pieces) if may_map() else []
        if mapped:
            stack.enter_context(survive_truncation([source.map() for source in mapped]))
        jobs = deque(_jobs(pieces, mapped))
        staged = [job for job in jobs if job.is_staged]
        staging = None
        if staged:
            # One buffer more than threads, so that a thread fills one while another is emptied.
            device = max((job.device for job in staged), key=lambda device: device.type != "cpu")
            nbytes = max(job.nbytes for job in staged)
            staging = stack.enter_context(Staging(device, count=min(threads, len(staged)) + 1, nbytes=nbytes))
            statistics.peak_buffer += staging.nbytes
        if any(job.method == "blocks" for job in jobs):
            statistics.peak_buffer += threads * BLOCK_BYTES
        _run(jobs, _Context(staging, statistics), threads, progress)
        for source in mapped:
            if source.map().lost:
                raise CheckpointError(f"checkpoint file {source.name}: truncated while it was read")
    statistics.seconds = perf_counter() - began
    return statistics


@dataclass(frozen=True)
class _Piece:
    """A box, and the destination of its shape."""

    box: Box
    destination: torch.Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes are the destination's, in the same order and with no others between them."""
        return self.box.rows == 1 and is_same_memory(self.destination, self.box.dtype)


def is_same_memory(destination: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a file's values of `dtype` are, byte by byte and in order, what `destination` holds."""
    return destination.device.type == "cpu" and destination.dtype == dtype and destination.is_contiguous()


class _Context:
    """What the jobs of one call share."""

    def __init__(self, staging: Staging | None, statistics: Statistics) -> None:
        self.staging, self.statistics, self.pages = staging, statistics, Pages()
        self._lock = threading.Lock()

    def count(self, method: str, nbytes: int, copied: int, seconds: float) -> None:
        """Add to what `method` has done."""
        with self._lock:
            entry = self.statistics.methods.setdefault(method, Method())
            entry.nbytes += nbytes
            entry.copied += copied
            entry.seconds += seconds


@dataclass(frozen=True)
class _Job:
    """What one thread does at a time: one piece, or several that are neighbours in the file and read into place."""

    pieces: Sequence[_Piece]
    method: str

    @property
    def nbytes(self) -> int:
        """Bytes for destinations."""
        return sum(piece.box.nbytes for piece in self.pieces)

    @property
    def device(self) -> torch.device:
        """Where the values go."""
        return self.pieces[0].destination.device

    @property
    def is_staged(self) -> bool:
        """Whether the values pass through a staging buffer."""
        (box, destination) = (self.pieces[0].box, self.pieces[0].destination)
        if destination.device.type != "cpu":
            return True
        return self.method != "map" and not is_same_memory(destination, box.dtype)

    def run(self, context: _Context) -> None:
        """Read, and where needed copy on."""
        began = perf_counter()
        box, destination = self.pieces[0].box, self.pieces[0].destination
        if len(self.pieces) > 1:
            copied = self.nbytes
            for piece in self.pieces:
                context.pages.clear(piece.destination)
            box.source.read(box.offset, [byte_view(piece.destination) for piece in self.pieces])
        elif self.is_staged:
            assert context.staging is not None
            with context.staging.buffer() as buffer:
                values = buffer[: box.nbytes].view(box.dtype).view(box.shape)
                copied = _READERS[self.method](box, values)
                context.staging.deliver(values, destination)
        else:
            context.pages.clear(destination)
            copied = _READERS[self.method](box, destination)
        context.count(self.method, self.nbytes, copied, perf_counter() - began)


def _read_contiguous(box: Box, destination: torch.Tensor) -> int:
    box.source.read(box.offset, [byte_view(destination)])
    return box.nbytes


def _read_rows(box: Box, destination: torch.Tensor) -> int:
    """One read a row."""
    view, position = byte_view(destination), 0
    for offset in box.run_offsets():
        box.source.read(offset, [view[position : position + box.run]])
        position += box.run
    return box.nbytes


def _read_blocks(box: Box, destination: torch.Tensor) -> int:
    """Whole rows into a buffer, and out of it the runs."""
    buffer = torch.empty(max(min(BLOCK_BYTES, box.span), box.run), dtype=torch.uint8)
    copied = 0
    for part, place in box.cut(destination, len(buffer), by_span=True):
        block = buffer[: part.span]
        part.source.read(part.offset, [byte_view(block)])
        copy(block.view(part.dtype).as_strided(part.shape, part.strides), place)
        copied += part.span
    return copied


def _read_map(box: Box, destination: torch.Tensor) -> int:
    """A strided copy out of the memory map."""
    assert isinstance(box.source, LocalFile)
    copy(box.source.map().view(box.offset, box.span, box.dtype, box.shape, box.strides), destination)
    box.source.count(box.nbytes)
    return box.nbytes


_READERS: dict[str, Callable[[Box, torch.Tensor], int]] = {
    "contiguous": _read_contiguous,
    "reads": _read_rows,
    "blocks": _read_blocks,
    "map": _read_map,
}
"""Name of a way to read -> the function that reads a box into a host tensor and returns how many bytes it copied."""


def _pieces(request: Request) -> Iterator[_Piece]:
    for box, destination in request.tensor.boxes(request.destination):
        yield from (_Piece(*part) for part in box.cut(destination, JOB_BYTES))


def _mapped(pieces: Sequence[_Piece]) -> list[LocalFile]:
    """The files of whose pieces some need more than a read into place, now mapped."""
    found = []
    for source, group in groupby(pieces, key=attrgetter("box.source")):
        if isinstance(source, LocalFile) and not all(piece.is_direct for piece in group):
            with suppress(OSError, ValueError):  # no maps on this file system, or a file that shrank
                source.map()
                found.append(source)
    return found


def _jobs(pieces: Sequence[_Piece], mapped: Sequence[Source]) -> Iterator[_Job]:
    """Pieces in file order -> jobs in file order."""
    together: list[_Piece] = []
    nbytes = 0
    for piece in pieces:
        box = piece.box
        follows = (
            piece.is_direct
            and together
            and box.source is together[-1].box.source
            and box.offset == together[-1].box.stop
            and nbytes + box.nbytes <= JOB_BYTES
            and len(together) < _BUFFERS_A_CALL
        )
        if together and not follows:
            yield _Job(together, "contiguous")
            together, nbytes = [], 0
        if piece.is_direct:
            together.append(piece)
            nbytes += box.nbytes
        else:
            yield _Job([piece], _method(piece, box.source in mapped))
    if together:
        yield _Job(together, "contiguous")


def _method(piece: _Piece, is_mapped: bool) -> str:
    """How to read a piece that is not read into place: out of the map only what is in the page cache."""
    box = piece.box
    if is_mapped:
        assert isinstance(box.source, LocalFile)
        is_mapped = box.offset % box.dtype.itemsize == 0 and box.source.is_resident([(box.offset, box.stop)])
    if box.rows > 1:
        return cheapest(box, may_map=is_mapped)
    return "map" if is_mapped and piece.destination.device.type == "cpu" else "contiguous"


def _run(jobs: deque[_Job], context: _Context, threads: int, progress: Callable[[int], object]) -> None:
    """Let `threads` threads do all jobs; the first error stops them, and is raised when all have ended."""
    finished: SimpleQueue[int | BaseException] = SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        try:
            if context.staging is not None:
                bind_thread(context.staging.device)
            torch.set_num_threads(1)  # of this thread: copies are shared among ours
            while not stop.is_set():
                try:
                    job = jobs.popleft()
                except IndexError:
                    return
                job.run(context)
                finished.put(job.nbytes)
        except BaseException as error:
            finished.put(error)

    left = len(jobs)
    torch_threads = torch.get_num_threads()
    workers = [threading.Thread(target=work, name=f"read-{index}") for index in range(min(threads, left))]
    try:
        for worker in workers:
            worker.start()
        while left:
            try:
                result = finished.get(timeout=_POLL_SECONDS)
            except Empty:
                handle_signals()
                continue
            if isinstance(result, BaseException):
                raise result
            left -= 1
            progress(result)
    finally:
        stop.set()
        for worker in workers:
            while worker.is_alive():
                worker.join(_POLL_SECONDS)
                handle_signals()
        torch.set_num_threads(torch_threads)
