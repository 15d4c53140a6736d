"""Check a way on the ranks that would use it: known sums of every dtype and many sizes, before a deadline, with a vote.

Drivers claim access to peers that hangs or returns other data (vLLM's issue 51513 lists cases), so a way is used only
after it summed integers exactly on all ranks. Some calls follow each other without a pause, on the same buffer.

A kernel that waits for another rank cannot be ended. So the check runs on a stream of its own, and polls an event.
After the deadline all ranks raise one error: even NCCL would share the GPU with a kernel that spins.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ...errors import MeshError, error_text
from .choice import Way

SECONDS = 30.0
"""Deadline of the check of one way. A check takes milliseconds; the first one loads kernels."""
LENGTHS = (1, 7, 64, 4099, 70_000)
"""Elements of the checked tensors, besides one that is longer than the buffer."""
PATIENCE = 300.0
"""Seconds until a rank that does not vote counts as lost."""

HUNG = "it did not finish"

T = TypeVar("T")


class Vote:
    """Exchange of one value of each rank through a store: also ranks with a GPU that hangs can vote."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """`store`: only for the votes of these ranks."""
        self.rank, self.size = rank, size
        self._store: Any = store
        self._round = 0

    def __call__(self, value: T) -> list[T]:
        """The values of all ranks. Raises DistStoreError if a rank does not vote."""
        self._round += 1
        keys = [f"{self._round} {rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(value))
        self._store.wait(keys, timedelta(seconds=PATIENCE))
        return [pickle.loads(self._store.get(key)) for key in keys]

    def on(self, function: Callable[[], T]) -> tuple[list[T], str]:
        """The results of `function` on all ranks and "", and the reason of the first rank on which it raised."""
        values, why = [], ""
        try:
            values.append(function())
        except Exception as error:
            why = error_text(error)
        answers = self((values, why))
        return [value for values, _ in answers for value in values], first([why for _, why in answers])


def first(words: list[str]) -> str:
    """The first word that is not empty, with its rank; "" if all are."""
    return next((f"{word} (rank {rank})" for rank, word in enumerate(words) if word), "")


def check(
    way: Way,
    all_reduce: Callable[[Tensor], None],
    dtypes: Collection[torch.dtype],
    device: torch.device,
    nbytes: int,
    vote: Vote,
    *,
    variable: str,
) -> str:
    """Check the sums of `all_reduce`, in place; returns the reason of a failure on any rank, or "". Collective.

    `nbytes`: length of the buffer; a longer tensor is checked too. `variable`: the environment variable to name.

    Raises MeshError on all ranks if the GPU of any is not done after `SECONDS`.
    """
    try:
        why = _run(all_reduce, dtypes, device, nbytes, vote)
    except Exception as error:
        why = error_text(error)
    words = vote(why)
    hung = [rank for rank, word in enumerate(words) if word == HUNG]
    if hung:
        others = first(["" if word == HUNG else word for word in words])
        raise MeshError(
            f"the all-reduce {way.value!r}",
            got=f"no result on rank {hung[0]} after {SECONDS:g} s" + (f"; {others}" if others else ""),
            expected="a sum: its kernel waits for a rank for ever, and leaves the GPU unusable for this process",
            fix=f"Start all ranks again with {variable}=nccl.",
        )
    return first(words)


def _run(
    all_reduce: Callable[[Tensor], None],
    dtypes: Collection[torch.dtype],
    device: torch.device,
    nbytes: int,
    vote: Vote,
) -> str:
    """Check the sums on this rank; returns the reason of a failure, or ""."""
    module = torch.get_device_module(device)
    stream, event = module.Stream(), module.Event()
    stream.wait_stream(module.current_stream())
    names, exact = [], []
    with module.stream(stream):
        for dtype in dtypes:
            for length in (*LENGTHS, nbytes // dtype.itemsize + 5):
                turns = [_numbers(vote.rank, length, turn, dtype, device) for turn in range(3)]
                for x in turns:  # without a pause
                    all_reduce(x)
                for turn, x in enumerate(turns):
                    parts = (_numbers(rank, length, turn, torch.int32, device) for rank in range(vote.size))
                    exact.append((x == sum(parts)).all())
                    names.append(f"{length} elements of {dtype}")
        event.record(stream)
        if not _is_done(event.query):
            return HUNG
        wrong = [name for name, is_exact in zip(names, torch.stack(exact).tolist(), strict=True) if not is_exact]
    return f"it returned a wrong sum of {wrong[0]}" if wrong else ""


def _numbers(rank: int, length: int, turn: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Integers from -2 to 2: their sums over 128 ranks are exact in every dtype."""
    index = torch.arange(length, dtype=torch.int32, device=device)
    return ((index * (rank + 2) + rank + turn) % 5 - 2).to(dtype)


def _is_done(query: Callable[[], bool]) -> bool:
    """Poll until `query` is true; False after `SECONDS`."""
    end = time.monotonic() + SECONDS
    while not query():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True
