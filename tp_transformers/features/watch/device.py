"""The end of NCCL after a failure, and the steps of optimizers that read what was left of its collectives.

The host does not wait for a collective of NCCL, which is a kernel. An aborted one returns without a result, and the
kernels that are enqueued behind it run on garbage, those of an optimizer's step too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from threading import Event, Thread
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Store, default_pg_timeout, get_backend_config

from ...errors import MeshError, error_text
from ...ranks.group import TensorParallelGroup, bind_thread
from ...torch_api import world

ABORTING = 60.0
"""Seconds to wait for the abort of this rank's communicators."""


class Steps:
    """The steps of optimizers that this rank has made over the shards of a process group."""

    count, running = 0, 0
    """Steps that have ended, and those that have begun and not ended: they run, or have raised."""
    is_cut = False
    """True if NCCL was aborted during a step, or before the kernels of the last one had finished."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_aborted = device, Event()
        self._last: Any = None
        """An event of the GPU behind the last step."""

    def begin(self) -> None:
        """Note that a step begins, which may be inside of another one."""
        self.running += 1

    def end(self) -> None:
        """Note that the host has made a step."""
        self.running, self.count = max(0, self.running - 1), self.count + 1
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device.type)
            self._last = self._last or module.Event()
            self._last.record(module.current_stream(self.device))

    def cut(self) -> None:
        """Note that NCCL is aborted now."""
        with suppress(RuntimeError):  # of a GPU that fails, as its probe will say
            is_done = self._last is None or self._last.query()
            self.is_cut = self.device.type != "cpu" and (self.running > 0 or not is_done)


def abort(device: torch.device, all_steps: Iterable[Steps]) -> None:
    """Abort the NCCL communicators of this process. In a thread of its own: calls of CUDA may wait for the GPU.

    An abort waits for the kernels of other communicators on the GPU, so all of them are aborted at once. Torch's
    `_group_start` does not do it: NCCL's groups are those of one thread, and ProcessGroupNCCL aborts in another one.
    """
    with suppress(RuntimeError):  # of a GPU after an illegal access: every call of it raises
        bind_thread(device)
    for steps in all_steps:
        steps.cut()
    groups = [group for group in list(world.pg_map) if "cuda:nccl" in get_backend_config(group)]
    threads = [Thread(target=_abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for steps in all_steps:
        steps.is_aborted.set()


def _abort(group: ProcessGroup) -> None:
    with suppress(RuntimeError):
        group.abort()


def check_unchanged(group: TensorParallelGroup, steps: Steps, store: Store) -> None:
    """Raise MeshError on all ranks if the model of one cannot go on. Collective, by `store`.

    A rank whose last step read what an aborted rank had sent has made more steps than that rank, or was cut off.
    """
    turn = store.add(f"turn {group.rank}", 1)  # one that refuses may be repeated
    keys = [f"steps {turn} {rank}" for rank in range(group.size)]
    store.set(keys[group.rank], json.dumps((steps.count, _fault(steps))))
    store.wait(keys, default_pg_timeout)
    counts, faults = zip(*(json.loads(store.get(key)) for key in keys), strict=True)
    found = [f"{fault} on rank {rank}" for rank, fault in enumerate(faults) if fault]
    if len(set(counts)) > 1:
        found.append(f"ranks that have made {' and '.join(map(str, sorted(set(counts))))} steps of optimizers")
    if found:
        raise MeshError(
            "renew_process_group",
            got="; ".join(found),
            expected="ranks with unchanged parameters",
            fix="Start all ranks again, and load the last checkpoint.",
        )


def _fault(steps: Steps) -> str:
    if not steps.is_aborted.wait(ABORTING):
        return f"NCCL that has not ended within {ABORTING:.0f} s, as where a CUDA graph holds it"
    try:
        torch.zeros(1, device=steps.device).item()
    except RuntimeError as error:
        return f"a GPU that fails ({error_text(error).partition(chr(10))[0]})"
    return "a step of an optimizer that was cut off" if steps.is_cut or steps.running else ""
