"""Slice requests -> reads in file order -> the memory of the parameters.

All requests are known before the first byte is read. They are split into `jobs`, which threads take in file order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from time import perf_counter

import torch

from ...ranks.group import bind_thread
from .jobs import BLOCK_BYTES, Job, Progress, Request, Statistics, order, split
from .memory import Pages, Staging


def read(
    requests: Iterable[Request],
    *,
    threads: int = 1,
    statistics: Statistics | None = None,
    progress: Progress = lambda nbytes: None,
) -> Statistics:
    """Fill the destinations of all `requests`.

    Destinations may be on CPUs and on one other device. All copies have finished on return. Adds the totals to
    `statistics`, and returns these.

    Raises CheckpointError if a file is shorter than its header declares, cannot be read, or changes meanwhile.
    """
    began = perf_counter()
    statistics = Statistics() if statistics is None else statistics
    blocks = [block for request in requests for block in split(request)]
    blocks.sort(key=lambda block: (block.tensor.source.name, block.tensor.start))
    with ExitStack() as stack:
        jobs = list(order(blocks))
        staged = [job for job in jobs if job.is_staged]
        staging, buffers = None, threads * BLOCK_BYTES if any(job.method == "blocks" for job in jobs) else 0
        if staged:
            # One buffer more than threads, so that each thread can fill one while another is emptied.
            device = max((job.device for job in staged), key=lambda device: device.type != "cpu")
            nbytes = max(job.nbytes for job in staged)
            staging = Staging(device, count=min(threads, len(staged)) + 1, nbytes=nbytes)
            stack.callback(staging.close)
            buffers += staging.nbytes
        statistics.peak_buffer = max(statistics.peak_buffer, buffers)
        _run(jobs, staging, statistics, threads, progress)
        for source in {block.tensor.source for block in blocks}:
            source.check_unchanged()
    statistics.seconds += perf_counter() - began
    return statistics


def _run(
    jobs: Sequence[Job], staging: Staging | None, statistics: Statistics, threads: int, progress: Progress
) -> None:
    """Run all jobs on `threads` threads; after an error, which is raised once all threads have ended, no job starts."""
    pages, torch_threads = Pages(), torch.get_num_threads()
    is_inference = torch.is_inference_mode_enabled()  # thread-local; destinations were allocated in this mode

    def run(job: Job) -> tuple[int, float]:
        began = perf_counter()
        if staging is not None:
            bind_thread(staging.device)
        with torch.inference_mode(is_inference):
            copied = job.run(staging, pages)
        return copied, perf_counter() - began

    try:  # the number of threads is thread-local: copies of several threads run in parallel
        with ThreadPoolExecutor(threads, "read", torch.set_num_threads, (1,)) as pool:
            for job, (copied, seconds) in zip(jobs, pool.map(run, jobs), strict=True):
                statistics.count(job.method, job.nbytes, copied, seconds)
                progress(job.nbytes)
    finally:
        torch.set_num_threads(torch_threads)
