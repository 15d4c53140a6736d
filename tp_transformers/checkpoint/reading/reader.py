"""Slice requests -> reads in file order -> the memory that the parameters will live in.

All requests are known before the first byte is read; threads take the `jobs` that they are cut into in file order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from operator import attrgetter
from queue import SimpleQueue
from time import perf_counter

import torch

from ...ranks.group import bind_thread
from .costs import BLOCK_BYTES
from .jobs import Context, Job, Request, Statistics, cut, order
from .local_file import LocalFile
from .memory import Staging


def read(
    requests: Iterable[Request], *, threads: int = 1, progress: Callable[[int], object] = lambda nbytes: None
) -> Statistics:
    """Fill the destinations of all `requests`; `progress` is called with byte counts as they arrive.

    Destinations may be on CPUs and on one other device, which has finished its copies on return.

    Raises CheckpointError where a file is shorter than its header says, cannot be read, or changes meanwhile.
    """
    began = perf_counter()
    statistics = Statistics()
    pieces = [piece for request in requests for piece in cut(request)]
    pieces.sort(key=lambda piece: (piece.tensor.source.name, piece.tensor.start))
    with ExitStack() as stack:
        mapped = _mapped(pieces)
        jobs = deque(order(pieces, mapped))
        staged = [job for job in jobs if job.is_staged]
        staging = None
        if staged:
            # One buffer more than threads, so that a thread fills one while another is emptied.
            device = max((job.device for job in staged), key=lambda device: device.type != "cpu")
            nbytes = max(job.nbytes for job in staged)
            staging = Staging(device, count=min(threads, len(staged)) + 1, nbytes=nbytes)
            stack.callback(staging.close)
            statistics.peak_buffer += staging.nbytes
        if any(job.method == "blocks" for job in jobs):
            statistics.peak_buffer += threads * BLOCK_BYTES
        _run(jobs, Context(staging, statistics), threads, progress)
        _check_unchanged(mapped)
    statistics.seconds = perf_counter() - began
    return statistics


def _mapped(pieces: Sequence[Request]) -> list[LocalFile]:
    """The files with a piece that needs more than a read into place, mapped by this call."""
    found = []
    for source, group in groupby(pieces, key=attrgetter("tensor.source")):
        if isinstance(source, LocalFile) and not all(piece.is_direct for piece in group):
            with suppress(OSError, ValueError):  # no maps on this file system, or a file that shrank
                source.map()
                found.append(source)
    return found


def _check_unchanged(mapped: Sequence[LocalFile]) -> None:
    """Raise CheckpointError where a mapped file was written to, or became shorter, since it was mapped."""
    for source in mapped:
        if source.map().has_changed():
            raise source.fault("a file that changed while it was read", "the same file throughout", "Load again.")


def _run(jobs: deque[Job], context: Context, threads: int, progress: Callable[[int], object]) -> None:
    """Let `threads` threads do all jobs; the first error stops them, and is raised when all have ended."""
    finished: SimpleQueue[int | BaseException] = SimpleQueue()
    stop = threading.Event()
    is_inference = torch.is_inference_mode_enabled()  # of this thread alone; destinations were made in it

    @torch.inference_mode(is_inference)
    def work() -> None:
        try:
            if context.staging is not None:
                bind_thread(context.staging.device)
            torch.set_num_threads(1)  # torch sets it for this thread alone: its copies run beside those of the others
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
            result = finished.get()
            if isinstance(result, BaseException):
                raise result
            left -= 1
            progress(result)
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        torch.set_num_threads(torch_threads)
