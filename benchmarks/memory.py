"""Memory and reads of this process: its shard; from /proc, anonymous memory separate from mapped files."""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

INTERVAL = 0.005
"""Seconds between two samples."""


class Watch:
    """Samples RssAnon + RssShmem and RssFile within the context, and takes the differences of the process' counters.

    VmHWM would mix both: pages of a mapped file depend on the page cache, anonymous memory does not.
    """

    def __enter__(self) -> Watch:
        self._file = os.open("/proc/self/status", os.O_RDONLY)
        self._sampled = 0
        self._done = threading.Event()
        self._before = _counters()
        self.anon_start, self.file_start = self.anon_peak, self.file_peak = self._sample()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self._take()
        after = _counters()
        os.close(self._file)
        self.counters = {name: after[name] - value for name, value in self._before.items()}
        self.counters["rchar"] -= self._sampled

    def result(self) -> dict[str, int]:
        """Bytes at the peak and at the start, and differences of the counters.

        rchar: bytes copied by read calls, without pages of mapped files. read_bytes: bytes that storage delivered for
        this process.
        """
        return {
            "anon_start": self.anon_start,
            "anon_peak": self.anon_peak,
            "file_start": self.file_start,
            "file_peak": self.file_peak,
            **self.counters,
        }

    def _run(self) -> None:
        while not self._done.wait(INTERVAL):
            self._take()

    def _take(self) -> None:
        anon, file = self._sample()
        self.anon_peak, self.file_peak = max(self.anon_peak, anon), max(self.file_peak, file)

    def _sample(self) -> tuple[int, int]:
        text = os.pread(self._file, 8192, 0)
        self._sampled += len(text)
        return _kilobytes(text, b"RssAnon:") + _kilobytes(text, b"RssShmem:"), _kilobytes(text, b"RssFile:")


def shard_bytes(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Bytes of tensors on one device, each storage once; and how many of them are in anonymous memory."""
    pieces = {tensor.data_ptr(): tensor for tensor in tensors if tensor.numel()}
    starts, anonymous = _maps()
    total = in_anonymous = 0
    for address, tensor in pieces.items():
        total += tensor.nbytes
        if tensor.device.type == "cpu" and anonymous[bisect_right(starts, address) - 1]:
            in_anonymous += tensor.nbytes
    return total, in_anonymous


def touch(tensors: Iterable[Tensor]) -> int:
    """Read one byte of every page of tensors on the CPU: a load that only maps files has read nothing yet."""
    total = 0
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.numel():
            continue
        order = sorted(range(tensor.ndim), key=lambda dim: tensor.stride(dim), reverse=True)
        rows = tensor.permute(order)
        if rows.is_contiguous():
            rows = rows.reshape(-1)
        # The last page of a row may contain no sampled byte, but it contains the last byte.
        rows = rows.view(torch.uint8)
        total += int(rows[..., :: mmap.PAGESIZE].sum()) + int(rows[..., -1].sum())
    return total


def _counters() -> dict[str, int]:
    text = Path("/proc/self/io").read_text(encoding="ascii")
    io = {name: int(value) for name, _, value in (line.partition(":") for line in text.splitlines())}
    return {name: io[name] for name in ("rchar", "read_bytes")}


def _kilobytes(text: bytes, name: bytes) -> int:
    return int(text[text.index(name) + len(name) :].split(maxsplit=1)[0]) * 1024


def _maps() -> tuple[list[int], list[bool]]:
    """(start, True if anonymous) of every mapping, in order."""
    starts, anonymous = [], []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        starts.append(int(addresses.partition("-")[0], 16))
        anonymous.append(inode == "0" or path[0].startswith(("/dev/zero", "/dev/shm/", "/memfd:")))
    return starts, anonymous


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter or buffer, on either side."""
    return getattr(tensor, "_local_tensor", tensor).detach()  # of a DTensor, or a plain shard
