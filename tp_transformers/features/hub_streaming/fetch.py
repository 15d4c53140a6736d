"""Requests for remote bytes -> few large ranges, each fetched by one rank and sent to the ranks that need it.

If ranks need long, disjoint ranges of a tensor, each fetches its own straight into place. For all other tensors
(row-parallel shards with one short range per row, norms, replicated heads) the ranks exchange their needs, split the
union into blocks in file order, and fetch block i on rank i % size. So together they fetch a checkpoint once, in ranges
of megabytes, for any plan.

They work in rounds: each rank fetches one block and one range of its own, all vote that none has failed, and then
exchange the bytes of the blocks. Requests of the next rounds run meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...checkpoint.reading.jobs import Request
from ...ranks.group import TensorParallelGroup, bind_thread
from ...slices.stored import Source, Stored
from ...torch_api import world
from .fetch_plan import CONNECTIONS, Bytes, FetchRange, Need, Positions, divide, split_request


def fetch(
    requests: Iterable[Request],
    sources: Sequence[Source],
    group: TensorParallelGroup,
    *,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Fill the destinations of all ranks' `requests`. Collective: call on all ranks with the same files as `sources`.

    `progress` is called with byte counts of this rank's requests. Holds CONNECTIONS blocks in memory.

    Raises CheckpointError on all ranks if one cannot fetch its ranges; `sources` are closed then.
    """
    # 1. Exchange needs.
    with group.agree():
        numbers = {id(source): number for number, source in enumerate(sources)}
        own = [
            Need(group.rank, numbers[id(block.tensor.source)], block.tensor, block.destination)
            for request in requests
            for block in split_request(request)
        ]
        slices = [(need.file, need.stored) for need in own]
        encoded = [
            (file, stored.offset, stored.stored_shape, stored.dtype, stored.selection) for file, stored in slices
        ]
    needs: list[Need] = []
    for rank, entries in enumerate(group.gather(encoded)):
        needs += own if rank == group.rank else [_need(rank, sources, *entry) for entry in entries]
    # 2. Divide the fetches; all ranks compute the same result.
    blocks, ranges = divide(needs, group.size)
    count, size = max(-(-len(blocks) // group.size), *map(len, ranges)), group.size
    rounds = [
        _Round(group, sources, blocks[number * size : (number + 1) * size], ranges[group.rank][number : number + 1])
        for number in range(count)
    ]
    # 3. Fetch round by round.
    pool = partial(ThreadPoolExecutor, CONNECTIONS, initializer=bind_thread, initargs=(group.device,))
    with _gloo(group) as channel, pool() as executor, _closed_on_failure(sources):
        waiting, under_way = iter(rounds), deque[tuple[_Round, list[Future[None]]]]()

        def start() -> None:
            while sum(len(jobs) for _, jobs in under_way) < CONNECTIONS and (following := next(waiting, None)):
                under_way.append((following, [executor.submit(job) for job in following.jobs()]))

        with group.agree():
            start()
        while under_way:
            current, jobs = under_way.popleft()
            group.meet(jobs)
            with group.agree():
                for job in jobs:
                    job.result()
                current.prepare()
            with group.agree():
                progress(current.deliver(channel))
                start()


def _need(rank: int, sources: Sequence[Source], file: int, offset: int, shape: Any, dtype: Any, selection: Any) -> Need:
    stored = Stored(sources[file], offset=offset, shape=shape, dtype=dtype, selection=selection)
    return Need(rank, file, stored)


@dataclass(eq=False)
class _Round:
    """One block of every rank, and one range of this rank's own; the last rounds have fewer."""

    group: TensorParallelGroup
    sources: Sequence[Source]
    blocks: list[FetchRange]
    ranges: list[FetchRange]
    bytes: Bytes | None = None
    """Bytes of this rank's block, once it is fetched."""
    sizes: list[tuple[int, int]] = field(init=False)
    """For every peer, the bytes that it needs of this rank's block, and that this rank needs of its block."""
    outgoing: Bytes = field(init=False)
    incoming: Bytes = field(init=False)

    def jobs(self) -> list[Callable[[], None]]:
        """Return this rank's requests, each to be called in a thread of its own."""
        jobs: list[Callable[[], None]] = []
        for block in self.blocks[self.group.rank : self.group.rank + 1]:
            self.bytes = np.empty(block.stop - block.start, dtype=np.uint8)
            jobs.append(partial(self.sources[block.file].read, block.start, [self.bytes.data]))
        for own_range in self.ranges:
            jobs.append(partial(self.sources[own_range.file].read, own_range.start, list(_places(own_range))))
        return jobs

    def prepare(self) -> None:
        """Allocate memory for received blocks and for the exchange, before any rank waits for another."""
        for block in self.blocks:
            for need in block.of(self.group.rank):
                len(need.memory)
        rank, ranks = self.group.rank, range(self.group.size)
        self.sizes = [(self._size(rank, peer), self._size(peer, rank)) for peer in ranks]
        self.outgoing, self.incoming = (np.empty(max(sizes), dtype=np.uint8) for sizes in zip(*self.sizes, strict=True))

    def deliver(self, channel: dist.ProcessGroup | None) -> int:
        """Exchange the fetched blocks; return how many needed bytes this rank got.

        A rank that fails still sends and receives as many bytes as its peers expect, and then raises.
        """
        rank, size, errors = self.group.rank, self.group.size, list[Exception]()
        count = sum(int(need.within(item.start, item.stop)[1].sum()) for item in self.ranges for need in item.needs)
        for step in range(size):
            receiver, owner = (rank + step) % size, (rank - step) % size
            sent, received = self.outgoing[: self.sizes[receiver][0]], self.incoming[: self.sizes[owner][1]]
            with _catch(errors):
                self._pack(receiver, sent)
            if step:
                _swap(channel, sent, receiver, received, owner)
            with _catch(errors):
                self._unpack(owner, received if step else sent)
            count += len(received)
        if errors:
            raise errors[0]
        for need in (need for item in (*self.blocks, *self.ranges) for need in item.needs):
            need.lacking -= 1
            if not need.lacking:
                need.finish()
        del self.bytes, self.outgoing, self.incoming
        return count

    def _needs_in_block(self, owner: int, rank: int) -> Iterator[tuple[Need, Positions, Positions, Positions]]:
        """Yield the needs of `rank` in the block of `owner`: (need, offsets in the block, lengths, positions)."""
        for block in self.blocks[owner : owner + 1]:
            for need in block.of(rank):
                offsets, lengths, positions = need.within(block.start, block.stop)
                yield need, offsets - block.start, lengths, positions

    def _size(self, owner: int, rank: int) -> int:
        """Count the bytes of the block of `owner` that `rank` needs."""
        return sum(int(lengths.sum()) for _, _, lengths, _ in self._needs_in_block(owner, rank))

    def _pack(self, rank: int, packed: Bytes) -> None:
        """Copy the bytes of this rank's block that `rank` needs into `packed`, one after the other."""
        filled = 0
        for _, offsets, lengths, _ in self._needs_in_block(self.group.rank, rank):
            assert self.bytes is not None
            ends = filled + np.cumsum(lengths)
            _copy(packed, ends - lengths, self.bytes, offsets, lengths)
            filled = int(ends[-1]) if len(ends) else filled

    def _unpack(self, owner: int, packed: Bytes) -> None:
        """Copy the bytes packed by `owner` for this rank into place."""
        taken = 0
        for need, _, lengths, positions in self._needs_in_block(owner, self.group.rank):
            ends = taken + np.cumsum(lengths)
            _copy(np.frombuffer(need.memory, dtype=np.uint8), positions, packed, ends - lengths, lengths)
            taken = int(ends[-1]) if len(ends) else taken


def _places(fetch_range: FetchRange) -> Iterator[memoryview]:
    """Yield buffers for the consecutive bytes of a range; gaps go to scratch memory."""
    ranges = []
    for need in fetch_range.needs:
        for offset, length, position in zip(*need.within(fetch_range.start, fetch_range.stop), strict=True):
            ranges.append((int(offset), need.memory[position : position + length]))
    reached = fetch_range.start
    for offset, buffer in sorted(ranges, key=itemgetter(0)):
        if offset > reached:
            yield memoryview(bytearray(offset - reached))
        yield buffer
        reached = offset + len(buffer)


def _copy(target: Bytes, starts: Positions, source: Bytes, offsets: Positions, lengths: Positions) -> None:
    """Copy `lengths[i]` bytes of `source` from `offsets[i]` to `starts[i]` of `target`, for all i."""
    singly = range(len(lengths))
    if len(lengths) > 3:
        # All but the first and the last, which may be clipped, are mostly rows of a matrix: one strided 2D copy.
        regular = [np.diff(starts[1:-1]), np.diff(offsets[1:-1]), lengths[1:-1]]
        if all(values.min() == values.max() for values in regular):
            rows = (len(lengths) - 2, int(lengths[1]))
            destination = np.lib.stride_tricks.as_strided(target[starts[1] :], rows, (int(regular[0][0]), 1))
            destination[...] = np.lib.stride_tricks.as_strided(source[offsets[1] :], rows, (int(regular[1][0]), 1))
            singly = range(0, len(lengths), len(lengths) - 1)
    for index in singly:
        start, offset, length = int(starts[index]), int(offsets[index]), int(lengths[index])
        target[start : start + length] = source[offset : offset + length]


def _swap(channel: dist.ProcessGroup | None, sent: Bytes, receiver: int, got: Bytes, sender: int) -> None:
    """Send `sent` to one rank while receiving `got` from another."""
    works = []
    if len(sent):
        works.append(dist.isend(torch.from_numpy(sent), group=channel, group_dst=receiver))
    if len(got):
        works.append(dist.irecv(torch.from_numpy(got), group=channel, group_src=sender))
    for work in works:
        assert work is not None
        work.wait()


@contextmanager
def _catch(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        errors.append(error)


@contextmanager
def _gloo(group: TensorParallelGroup) -> Iterator[dist.ProcessGroup | None]:
    """Yield a process group for CPU tensors: that of the `tp` axis, or a new one if it was created without gloo.

    Torch names a new group after the number of groups in its process. That number may differ between ranks (other
    groups of the user), so ranks with fewer groups first create groups of one.
    """
    if group.size == 1 or "gloo" in dist.get_backend_config(group.process_group):
        yield group.process_group
        return
    counts = group.gather(len(world.pg_names))
    groups: list[Any] = [  # torch types them as groups, or as numbers too
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        for _ in range(max(counts) - counts[group.rank])
    ]
    groups.append(dist.new_group(group.global_ranks, backend="gloo", use_local_synchronization=True))
    try:
        yield groups[-1]
    finally:
        for created in groups:
            dist.destroy_process_group(created)


@contextmanager
def _closed_on_failure(sources: Sequence[Source]) -> Iterator[None]:
    """Close the sources if the block fails, so that threads reading them stop."""
    try:
        yield
    except BaseException:
        for source in sources:
            source.close()
        raise
