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
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate
from math import prod
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import MeshError
from ...ranks.direct import MAX, SUM, Transport
from ...ranks.group import agreed
from ...ranks.limits import visible_cores
from ...torch_api import current_backward, is_watched
from ..places.place import out_of_step, this_collective
from . import operators
from .segment import KIND, LENGTH, SLOT, WORDS, Segment, check_dtype, chunks, combine

ONE_STEP = 1 << 18
"""Most bytes of an all-reduce in one step, on more than two ranks."""

MANY_LOOKS, FEW_LOOKS = 2000, 100
"""Spins on a counter before a rank sleeps: about 100 us, or 5 us if ranks share cores."""
NAP = 0.05
"""Seconds of sleep between checks for a timeout, an ended rank or ended collectives."""

_ALL_REDUCE, _MAXIMUM, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL, _BROADCAST, _MESSAGES = range(7)
_BY_BACKEND = 1 << 62
"""Flag in the word of a collective: this rank calls the backend."""
_PLACE, _PLACES, _OF_BACKWARD = 56, 31, 32
"""First bit in the word of the collective's place in its call, its largest value, and a flag for those of a backward;
from 1, and 0 outside of calls."""
_COLLECTIVE = (1 << _PLACE) - 1
"""Bits of the word that are equal on all ranks: kind, dtype and a hash of the shape."""
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
_NUMBERS = {dtype: number << 8 for number, dtype in enumerate(_DTYPES)}
"""Bits of each dtype in the word of a collective."""


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
            except BaseException as error:
                if isinstance(error, _OutOfStepError):
                    raise self._explained(collective.__name__, args) from None
                if self.collectives != begun:
                    self._ended = self._ended or "an earlier one was broken off"
                raise
            finally:
                self._thread = 0

    return in_turn


class SharedMemory(Transport):
    """Transport of a process group on one machine."""

    notices = True
    operators = operators

    def __init__(self, segment: Segment, timeout: float, *, is_complete: bool = True) -> None:
        """The transport owns `segment`. `timeout`: seconds to wait for another rank.

        `is_complete`: False for the ranks of one machine, if the group has others.
        """
        self._segment, self._words = segment, segment.words
        self.rank, self.size, self.timeout = segment.rank, segment.size, timeout
        self._own = self.rank * WORDS
        self._others = [rank * WORDS for rank in range(self.size) if rank != self.rank]
        self._looks = MANY_LOOKS if self.size <= visible_cores() else FEW_LOOKS
        self._is_complete = is_complete
        self._count = self._turn = self._calls = self._entered = 0
        self._slots: dict[tuple[torch.Size, torch.dtype], list[list[Tensor]]] = {}
        self._lock, self._thread = threading.Lock(), 0
        self._ended = ""
        self.collectives = 0
        _ALL.add(self)

    @property
    def ended(self) -> str:
        return self._ended

    def end(self, why: str) -> None:
        self._ended = why

    def enter(self) -> None:
        if not self._calls:
            self._entered = self.collectives
        self._calls += 1

    def leave(self) -> None:
        self._calls = max(0, self._calls - 1)

    @_in_turn
    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> bool:
        x = x.detach() if x.requires_grad else x
        is_maximum = op is not SUM and op == MAX  # a comparison of ReduceOps takes 0.5 us
        kind, nbytes = _MAXIMUM if is_maximum else _ALL_REDUCE, x.nbytes
        check_dtype(x.dtype, is_maximum=is_maximum)
        word = _word(kind, x)
        if nbytes <= (SLOT if self.size == 2 else ONE_STEP):
            slots = self._write(x, word)
            if slots is None:
                return False
            combine(slots, x, is_maximum=is_maximum)
            return True
        flat = x.reshape(-1)
        for chunk in flat.split(SLOT // x.itemsize):
            slots = self._write(chunk, word)
            if slots is None:
                return False
            shares, results = [slot.tensor_split(self.size) for slot in slots], chunk.tensor_split(self.size)
            own = results[self.rank]
            combine([share[self.rank] for share in shares], own, is_maximum=is_maximum)
            shares[self.rank][self.rank].copy_(own)
            self._step()
            for rank, result in enumerate(results):
                if rank != self.rank:
                    result.copy_(shares[rank][rank])
        if not x.is_contiguous():
            x.copy_(flat.view_as(x))
        return True

    @_in_turn
    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> bool:
        word = _word(_ALL_GATHER, x)
        for chunk, *out_chunks in chunks(SLOT, x, *outs):
            slots = self._write(chunk, word)
            if slots is None:
                return False
            for out, slot in zip(out_chunks, slots, strict=True):
                out.copy_(slot)
        return True

    @_in_turn
    def reduce_scatter(self, x: Tensor, own: Tensor) -> bool:
        check_dtype(x.dtype)
        word = _word(_REDUCE_SCATTER, x)
        rows, out = x.view(self.size, -1), own.view(-1)
        length = SLOT // self.size // x.itemsize
        for chunk, summed in zip(rows.split(length, 1), out.split(length), strict=True):
            slots = self._write(chunk, word)
            if slots is None:
                return False
            combine([slot[self.rank] for slot in slots], summed)
        return True

    @_in_turn
    def broadcast(self, x: Tensor, source: int) -> bool:
        x = x.detach() if x.requires_grad else x
        word = _word(_BROADCAST, x)
        dense = x.contiguous()
        for (chunk,) in chunks(SLOT, dense):
            slots = self._write(chunk, word, writes=self.rank == source)
            if slots is None:
                return False
            if self.rank != source:
                chunk.copy_(slots[source])
        if dense is not x and self.rank != source:
            x.copy_(dense)
        return True

    @_in_turn
    def all_to_all(self, received: Tensor, sent: Tensor, rows: Sequence[int], counts: Sequence[int]) -> bool:
        width = prod(sent.shape[1:]) * sent.itemsize
        sent_bytes, received_bytes = sent.view(-1).view(torch.uint8), received.view(-1).view(torch.uint8)
        room, segment = SLOT // self.size // 16 * 16, self._segment
        starts = [width * row for row in accumulate(counts, initial=0)]
        ends = [width * row for row in accumulate(rows, initial=0)]
        longest, offset, word = 1, 0, _word(_ALL_TO_ALL, sent, rows=False)
        while offset < longest:
            if not self._begin(word, length=max(counts, default=0) * width):
                own = segment.tensor[segment.offset(self.rank, self._turn) :][:SLOT]
                for rank in range(self.size):
                    chunk = sent_bytes[starts[rank] : starts[rank + 1]][offset : offset + room]
                    own[rank * room :][: len(chunk)] = chunk
            self._publish()
            if not self._wait():
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
        segment, received = self._segment, [bytearray() for _ in range(self.size)]
        longest, offset = 1, 0
        while offset < longest:
            self._begin(_MESSAGES, length=len(message))
            chunk, start = message[offset : offset + SLOT], segment.offset(self.rank, self._turn)
            segment.bytes[start : start + len(chunk)] = chunk
            self._publish()
            self._wait()
            lengths = self._lengths()
            longest = max(lengths)
            for rank, length in enumerate(lengths):
                start = segment.offset(rank, self._turn)
                received[rank] += segment.bytes[start : start + min(max(length - offset, 0), SLOT)]
            offset += SLOT
        self._entered = self.collectives  # a rank that failed has made fewer until a vote
        return [bytes(data) for data in received]

    # One step: begin, write, publish, wait.

    def _write(self, x: Tensor, word: int, *, writes: bool = True) -> list[Tensor] | None:
        """Write `x`, wait, and return all ranks' slots as tensors like `x`; None if a rank calls the backend.

        `word`: as of `_word`.
        """
        if self._begin(word):
            self._publish()
            self._wait()
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
        return views if self._wait() else None

    def _begin(self, word: int, length: int = 0) -> bool:
        """Begin a collective; True if this rank has to call the backend: a dispatch mode must not see a slot."""
        if self._ended:
            raise self._error(self._ended)
        self.collectives += 1
        self._turn ^= 1
        by_backend = word != _MESSAGES and is_watched() > 0
        if self._calls and word != _MESSAGES:
            place = (self.collectives - self._entered) % _PLACES + 1
            word |= (place | _OF_BACKWARD if current_backward() >= 0 else place) << _PLACE
        self._words[self._own + KIND + self._turn] = word | (_BY_BACKEND if by_backend else 0)
        self._words[self._own + LENGTH + self._turn] = length
        return by_backend

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

    def _wait(self) -> bool:
        """Wait until all ranks have begun the same collective; False if one of them calls the backend.

        Raises _OutOfStepError, on all ranks, if they have begun different ones.
        """
        words, count, turn = self._words, self._count, self._turn + KIND
        own, is_equal = words[self._own + turn], True
        for base in self._others:
            if words[base] < count:
                self._until(base, count)
            if words[base + turn] != own:
                is_equal = False
        if is_equal:
            return own < _BY_BACKEND
        begun = [words[rank * WORDS + turn] for rank in range(self.size)]
        places = {word % _BY_BACKEND >> _PLACE for word in begun} - {0}
        if len({word & _COLLECTIVE for word in begun}) > 1 or len(places) > 1:
            raise _OutOfStepError
        return max(begun) < _BY_BACKEND

    def _explained(self, kind: str, args: Sequence[object]) -> MeshError:
        """The error of ranks in different collectives, equal on all of them: a slot takes a rank's description."""
        if self._ended:
            raise self._error(self._ended)
        segment, text = self._segment, this_collective(kind, next(iter(args), None)).encode()[:SLOT]
        start = segment.offset(self.rank, self._turn)
        segment.bytes[start : start + len(text)] = text
        self._words[self._own + LENGTH + self._turn] = len(text)
        self._step()
        starts = [segment.offset(rank, self._turn) for rank in range(self.size)]
        texts = [bytes(segment.bytes[start:][:length]) for start, length in zip(starts, self._lengths(), strict=True)]
        error = out_of_step([text.decode(errors="replace") for text in texts])
        return agreed(error) if self._is_complete else error

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


class _OutOfStepError(Exception):
    """The ranks have begun different collectives."""


def _word(kind: int, x: Tensor, *, rows: bool = True) -> int:
    """The kind, dtype and shape of a collective; without `rows`, the shape of a row."""
    shape = x.shape if rows else x.shape[1:]
    return (hash(shape) << 16 | _NUMBERS[x.dtype] | kind) & _COLLECTIVE


_ALL: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def _leave() -> None:
    for transport in _ALL:
        transport.end("this process is a fork of a rank")
        transport._lock, transport._thread = threading.Lock(), 0  # a thread of the rank may have held the lock
        transport._segment.leave()


os.register_at_fork(after_in_child=_leave)
