"""Slice requests -> reads in file order -> the memory that the parameters will live in.

Requests are walked in file order. Bytes that stand next to each other in the file are read by one `preadv`, whatever
tensors they belong to, straight into place; what a rank does not keep is never read, so that a slice of a trailing dim
takes one read a row. Where the destination is on another device, of another dtype or not contiguous (a piece of a
transposed parameter), bytes go through one bounded staging buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from ..lazy import Stored, byte_view
from .source import Source

STAGING_BYTES = 32 << 20
"""Size of the staging buffer, in bytes."""

_BATCH = 512
"""Buffers in one read call."""


@dataclass(frozen=True)
class Request:
    """Read `tensor` into `destination`: of the same shape, but of any strides, device and dtype to cast to."""

    tensor: Stored
    destination: torch.Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes are the destination's, in the same order."""
        destination = self.destination
        return (
            destination.device.type == "cpu" and destination.dtype == self.tensor.dtype and destination.is_contiguous()
        )


def read(requests: Iterable[Request], *, progress: Callable[[int], object] = lambda nbytes: None) -> None:
    """Fill the destinations of all `requests`; `progress` is called with byte counts as they arrive.

    Raises CheckpointError where a file is shorter than its header says or cannot be read.
    """
    direct: dict[Source, list[Request]] = {}
    staged: list[Request] = []
    for request in requests:
        if request.is_direct:
            direct.setdefault(request.tensor.source, []).append(request)
        else:
            staged.append(request)
    for source, group in direct.items():
        _read_direct(source, group, progress)
    if staged:
        largest = max(request.tensor.nbytes for request in staged)
        staging = torch.empty(min(STAGING_BYTES, largest), dtype=torch.uint8)
        for request in _in_file_order(staged):
            _read_staged(request, staging, progress)


def _read_direct(source: Source, requests: list[Request], progress: Callable[[int], object]) -> None:
    """Read into place, joining neighbours of the file into one call."""
    batch: list[memoryview] = []
    begin = end = 0
    for offset, buffer in chain.from_iterable(map(_targets, _in_file_order(requests))):
        if batch and (offset != end or len(batch) == _BATCH):
            source.read(begin, batch)
            progress(end - begin)
            batch = []
        if not batch:
            begin = end = offset
        batch.append(buffer)
        end += len(buffer)
    if batch:
        source.read(begin, batch)
        progress(end - begin)


def _in_file_order(requests: list[Request]) -> list[Request]:
    return sorted(requests, key=lambda request: (request.tensor.source.name, request.tensor.start))


def _targets(request: Request) -> Iterator[tuple[int, memoryview]]:
    """Where each run of the request goes: (file offset, piece of the destination)."""
    view = byte_view(request.destination)
    position = 0
    for offset, length in request.tensor.runs():
        yield offset, view[position : position + length]
        position += length


def _read_staged(request: Request, staging: torch.Tensor, progress: Callable[[int], object]) -> None:
    """Read as much as `staging` holds, copy it to its place (cast, move, reorder), and so on."""
    tensor, destination = request.tensor, request.destination
    if tensor.nbytes <= len(staging):
        values = staging[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        _read_direct(tensor.source, [Request(tensor, values)], progress)
        destination.copy_(values)
        return
    dim = next(dim for dim, length in enumerate(tensor.shape) if length > 1)
    length = tensor.shape[dim]
    step = max(len(staging) * length // tensor.nbytes, 1)
    for start in range(0, length, step):
        stop = min(start + step, length)
        part = Request(tensor.select(dim, [(start, stop)]), destination.narrow(dim, start, stop - start))
        _read_staged(part, staging, progress)
