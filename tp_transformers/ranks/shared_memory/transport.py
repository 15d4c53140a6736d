"""Collectives of CPU tensors through memory that all ranks map.

    rank 0   x0 ─> slot ─┐  count            x0 + x1
                         ├─ all have come ─>
    rank 1   x1 ─> slot ─┘  count            x0 + x1

One step: a rank copies its tensor into its slot, increments its counter, waits for the counters of the others, and
reads their slots. An all-reduce of a large tensor takes two steps, a reduce-scatter and an all-gather, so that each
rank only adds its own chunk (Thakur, Rabenseifner and Gropp 2005). All ranks add in rank order, so results are bitwise
equal. 16-bit floats are summed in float32, and rounded once.

Each rank alternates between two slots. A rank that begins a collective has finished reading the previous one; so a slot
is free once all ranks have begun the collective after it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from math import prod
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..limits import visible_cores
from .interface import MAX, SUM, Transport
from .segment import KIND, LENGTH, SLOT, WORDS, Segment

ONE_STEP = 1 << 18
"""Most bytes of an all-reduce in one step, on more than two ranks."""

MANY_LOOKS, FEW_LOOKS = 2000, 100
"""Spins on a counter before a rank sleeps: about 100 us, or 5 us if ranks share cores."""
NAP = 0.05
"""Seconds of sleep between checks for a timeout, an ended rank or ended collectives."""

_ALL_REDUCE, _MAXIMUM, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL, _BROADCAST, _MESSAGES = range(7)
_BY_BACKEND = 1 << 62
"""Flag in the word of a collective: this rank calls the backend."""
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
_NUMBERS = {dtype: number << 8 for number, dtype in enumerate(_DTYPES)}
"""Bits of each dtype in the word of a collective."""
_SHORT = (torch.float16, torch.bfloat16)


P = ParamSpec("P")
R = TypeVar("R")


def _in_turn(
    collective: Callable[Concatenate[SharedMemory, P], R],
) -> Callable[Concatenate[SharedMemory, P], R]:
    """Serialize the collectives of threads; an interrupted collective is the last one.

    After an error between its steps, such as an interrupt, the other ranks could mistake the next bytes of this rank
    for the rest of it. A collective in a signal handler that interrupts another one raises: it would wait forever.
    """

    @wraps(collective)
    def in_turn(self: SharedMemory, /, *args: P.args, **kwargs: P.kwargs) -> R:
        thread = threading.get_ident()
        if self._thread == thread:
            raise self._error("called by a signal handler inside of another one; set a flag there, and call it later")
        with self._lock:
            begun, self._thread = self.collectives, thread
            try:
                return collective(self, *args, **kwargs)
            except BaseException:
                if self.collectives != begun:
                    self._ended = self._ended or "an earlier one was broken off"
                raise
            finally:
                self._thread = 0

    return in_turn


class SharedMemory(Transport):
    """Transport of a process group on one machine."""

    def __init__(self, segment: Segment, timeout: float) -> None:
        """The transport owns `segment`. `timeout`: seconds to wait for another rank."""
        self._segment, self._words = segment, segment.words
        self.rank, self.size, self.timeout = segment.rank, segment.size, timeout
        self._own = self.rank * WORDS
        self._others = [rank * WORDS for rank in range(self.size) if rank != self.rank]
        self._looks = MANY_LOOKS if self.size <= visible_cores() else FEW_LOOKS
        self._count = self._turn = 0
        self._slots: dict[tuple[torch.Size, torch.dtype], list[list[Tensor]]] = {}
        self._lock, self._thread = threading.Lock(), 0
        self._ended = ""
        self.collectives = 0
        _ALL.add(self)

    @property
    def ended(self) -> str:
        """See `Transport`."""
        return self._ended

    def end(self, why: str) -> None:
        """See `Transport`."""
        self._ended = why

    @_in_turn
    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = SUM, *, by_backend: bool = False) -> bool:
        """See `Transport`."""
        x = x.detach() if x.requires_grad else x
        is_maximum = op is not SUM and op == MAX  # a comparison of ReduceOps takes 0.5 us
        kind, nbytes = _MAXIMUM if is_maximum else _ALL_REDUCE, x.nbytes
        _check(kind, x.dtype)
        word = nbytes << 16 | _NUMBERS[x.dtype] | kind
        if nbytes <= (SLOT if self.size == 2 else ONE_STEP):
            slots = self._write(x, word, by_backend)
            if slots is None:
                return False
            _combine(slots, x, is_maximum=is_maximum)
            return True
        flat = x.reshape(-1)
        for chunk in flat.split(SLOT // x.itemsize):
            slots = self._write(chunk, word, by_backend)
            if slots is None:
                return False
            shares, results = [slot.tensor_split(self.size) for slot in slots], chunk.tensor_split(self.size)
            own = results[self.rank]
            _combine([share[self.rank] for share in shares], own, is_maximum=is_maximum)
            shares[self.rank][self.rank].copy_(own)
            self._step()
            for rank, result in enumerate(results):
                if rank != self.rank:
                    result.copy_(shares[rank][rank])
        if not x.is_contiguous():
            x.copy_(flat.view_as(x))
        return True

    @_in_turn
    def all_gather(self, x: Tensor, outs: Sequence[Tensor], *, by_backend: bool = False) -> bool:
        """See `Transport`."""
        word = x.nbytes << 16 | _NUMBERS[x.dtype] | _ALL_GATHER
        for chunk, *out_chunks in _chunks(SLOT, x, *outs):
            slots = self._write(chunk, word, by_backend)
            if slots is None:
                return False
            for out, slot in zip(out_chunks, slots, strict=True):
                out.copy_(slot)
        return True

    @_in_turn
    def reduce_scatter(self, x: Tensor, own: Tensor, *, by_backend: bool = False) -> bool:
        """See `Transport`."""
        _check(_ALL_REDUCE, x.dtype)
        word = x.nbytes << 16 | _NUMBERS[x.dtype] | _REDUCE_SCATTER
        rows, out = x.view(self.size, -1), own.view(-1)
        length = SLOT // self.size // x.itemsize
        for chunk, summed in zip(rows.split(length, 1), out.split(length), strict=True):
            slots = self._write(chunk, word, by_backend)
            if slots is None:
                return False
            _combine([slot[self.rank] for slot in slots], summed)
        return True

    @_in_turn
    def broadcast(self, x: Tensor, source: int, *, by_backend: bool = False) -> bool:
        """See `Transport`."""
        x = x.detach() if x.requires_grad else x
        word = x.nbytes << 16 | _NUMBERS[x.dtype] | _BROADCAST
        dense = x.contiguous()
        for (chunk,) in _chunks(SLOT, dense):
            slots = self._write(chunk, word, by_backend, writes=self.rank == source)
            if slots is None:
                return False
            if self.rank != source:
                chunk.copy_(slots[source])
        if dense is not x and self.rank != source:
            x.copy_(dense)
        return True

    @_in_turn
    def all_to_all(
        self, received: Tensor, sent: Tensor, rows: Sequence[int], counts: Sequence[int], *, by_backend: bool = False
    ) -> bool:
        """See `Transport`."""
        width = prod(sent.shape[1:]) * sent.itemsize
        sent_bytes, received_bytes = sent.view(-1).view(torch.uint8), received.view(-1).view(torch.uint8)
        room, segment = SLOT // self.size // 16 * 16, self._segment
        starts, ends = _starts(counts, width), _starts(rows, width)
        longest, offset = 1, 0
        while offset < longest:
            self._begin(_ALL_TO_ALL, by_backend, length=max(counts, default=0) * width)
            if not by_backend:
                own = segment.tensor[segment.offset(self.rank, self._turn) :][:SLOT]
                for rank in range(self.size):
                    chunk = sent_bytes[starts[rank] : starts[rank + 1]][offset : offset + room]
                    own[rank * room :][: len(chunk)] = chunk
            self._publish()
            if not self._wait(_ALL_TO_ALL):
                return False
            longest = max(self._lengths())
            for rank in range(self.size):
                chunk = received_bytes[ends[rank] : ends[rank + 1]][offset : offset + room]
                start = segment.offset(rank, self._turn) + self.rank * room
                chunk.copy_(segment.tensor[start : start + len(chunk)])
            offset += room
        return True

    @_in_turn
    def messages(self, message: bytes) -> list[bytes]:
        """See `Transport`."""
        segment, received = self._segment, [bytearray() for _ in range(self.size)]
        longest, offset = 1, 0
        while offset < longest:
            self._begin(_MESSAGES, False, length=len(message))
            chunk, start = message[offset : offset + SLOT], segment.offset(self.rank, self._turn)
            segment.bytes[start : start + len(chunk)] = chunk
            self._publish()
            self._wait(_MESSAGES)
            lengths = self._lengths()
            longest = max(lengths)
            for rank, length in enumerate(lengths):
                start = segment.offset(rank, self._turn)
                received[rank] += segment.bytes[start : start + min(max(length - offset, 0), SLOT)]
            offset += SLOT
        return [bytes(data) for data in received]

    # One step: begin, write, publish, wait.

    def _write(self, x: Tensor, word: int, by_backend: bool, *, writes: bool = True) -> list[Tensor] | None:
        """Write `x`, wait, and return all ranks' slots as tensors like `x`; None if a rank calls the backend.

        `word`: byte count, dtype and kind of the collective, equal on all ranks.
        """
        self._begin(word, by_backend)
        if by_backend:  # a dispatch mode is active, which must not see a slot
            self._publish()
            self._wait(word)
            return None
        slots = self._slots.get((x.shape, x.dtype))
        if slots is None:
            if len(self._slots) > 256:
                self._slots.clear()
            slots = self._slots[x.shape, x.dtype] = self._segment.slots(x.shape, x.dtype)
        views = slots[self._turn]
        if writes:
            views[self.rank].copy_(x.detach() if x.requires_grad else x)
        self._publish()
        return views if self._wait(word) else None

    def _begin(self, word: int, by_backend: bool, length: int = 0) -> None:
        if self._ended:
            raise self._error(self._ended)
        self.collectives += 1
        self._turn ^= 1
        self._words[self._own + KIND + self._turn] = word | (_BY_BACKEND if by_backend else 0)
        self._words[self._own + LENGTH + self._turn] = length

    def _publish(self) -> None:
        self._count += 1
        self._segment.publish(self._count)

    def _step(self) -> None:
        """The second step of a collective."""
        self._publish()
        words, count = self._words, self._count
        for base in self._others:
            if words[base] < count:
                self._until(base, count)

    def _wait(self, word: int) -> bool:
        """Wait until all ranks have begun the same collective; False if one of them calls the backend."""
        words, count, turn = self._words, self._count, self._turn + KIND
        is_by_backend = words[self._own + turn] != word
        for base in self._others:
            if words[base] < count:
                self._until(base, count)
            peer_word = words[base + turn]
            if peer_word != word:
                if peer_word & ~_BY_BACKEND != word:
                    self._until(base, 1 << 62)  # it is in another collective: wait until the watch ends both
                is_by_backend = True
        return not is_by_backend

    def _lengths(self) -> list[int]:
        return [self._words[rank * WORDS + LENGTH + self._turn] for rank in range(self.size)]

    def _until(self, base: int, count: int) -> None:
        """Wait until the counter of the rank with words at `base` reaches `count`.

        Raises DistBackendError if the collectives or the rank's process have ended, or after the timeout.
        """
        words, rank = self._words, base // WORDS
        for _ in range(self._looks):
            if words[base] >= count:
                return
        began, waited = time.monotonic(), 0.0
        while words[base] < count:
            if self._ended:
                raise self._error(self._ended)
            if waited > self.timeout:
                raise self._error(f"waited {waited:.0f} s, the timeout of the group, for rank {rank} of it")
            if waited > NAP and self._segment.has_ended(rank) and words[base] < count:
                raise self._error(f"rank {rank} of the group has ended")
            self._segment.sleep(rank, count, NAP)
            waited = time.monotonic() - began

    def _error(self, text: str) -> dist.DistBackendError:
        return dist.DistBackendError(f"a collective through shared memory: {text}")


_ALL: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def _leave() -> None:
    for transport in _ALL:
        transport.end("this process is a fork of a rank")
        transport._lock, transport._thread = threading.Lock(), 0  # a thread of the rank may have held the lock
        transport._segment.leave()


os.register_at_fork(after_in_child=_leave)


@cache
def _check(kind: int, dtype: torch.dtype) -> None:
    """Raise torch's error for a dtype without a sum or maximum, before a rank begins the collective."""
    numbers = [torch.empty(1, dtype=dtype) for _ in range(3)]
    _combine(numbers[:2], numbers[2], is_maximum=kind == _MAXIMUM)


def _combine(slots: Sequence[Tensor], out: Tensor, *, is_maximum: bool = False) -> None:
    """Write the sum of the slots, in order, or their maximum to `out`, which is not one of them."""
    first, second, *rest = slots
    if is_maximum:
        torch.maximum(first, second, out=out)
        for slot in rest:
            torch.maximum(out, slot, out=out)
    elif out.dtype in _SHORT:
        total = first.float()
        for slot in (second, *rest):
            total += slot
        out.copy_(total)
    else:
        torch.add(first, second, out=out)
        for slot in rest:
            out += slot


def _chunks(nbytes: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in chunks of at most `nbytes`; longer tensors have to be contiguous and of one shape."""
    if tensors[0].nbytes <= nbytes:
        yield tensors
    else:
        yield from zip(*(tensor.view(-1).split(nbytes // tensor.itemsize) for tensor in tensors), strict=True)


def _starts(counts: Sequence[int], width: int) -> list[int]:
    """Byte offsets of consecutive chunks with `counts` rows of `width` bytes, and the end of the last."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count * width)
    return starts
