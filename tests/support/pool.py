"""A warm pool of worker processes: `pool.run(size, function, *args)` runs a function on `size` gloo ranks.

Workers start once a session, since importing torch and transformers takes longer than most cases. Every call gets a
process group of its own, which the library itself starts from torchrun's environment variables.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT = float(os.environ.get("TEST_TIMEOUT", 240))
"""Seconds that one call may take before its workers are ended."""


PACKAGE = Path(__file__).parents[2] / "tp_transformers"
PRELOADED = [
    "tests",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.generation",
    "transformers.trainer",
    "tests.support.architectures",
    "tests.support.tiny",
    *(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "__main__.py"
    ),
]
"""What the process imports that workers are forked from: a worker begins with them."""
multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)

KEPT = 8
"""Workers that wait for the next call; more of them, beside those of another session, would fill the memory."""


class WorkerError(AssertionError):
    """A worker raised, died or timed out; carries every rank's error and the tail of its stderr."""

    def __init__(self, message: str, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.errors = errors
        """rank -> "ErrorType: message" of the ranks that raised."""


class Pool:
    """Worker processes that are started when first needed and ended by `close`.

    They are forked from a process that has imported PRELOADED, in the environment of the first one; or each is a new
    interpreter in the environment of now, with `spawn=True`.
    """

    def __init__(self, *, spawn: bool = False) -> None:
        self._spawn = spawn
        self._workers: list[_Worker] = []

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Call `function(*args)` on ranks 0 to size - 1; returns their results in rank order.

        Raises WorkerError unless all of them return in time. Workers that hang or die are replaced.
        """
        while len(self._workers) < size:
            self._workers.append(_Worker(self._spawn))
        workers = self._workers[:size]
        port = free_port()
        for rank, worker in enumerate(workers):
            worker.connection.send((rank, size, port, function, args))
            if rank == 0:
                with contextlib.suppress(EOFError):
                    worker.connection.recv()  # it listens: a rank that finds no store looks again half a second later
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        traces: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(workers))
        while waiting:
            ready = wait([worker.connection for worker in waiting.values()], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank, worker in list(waiting.items()):
                if worker.connection in ready:
                    del waiting[rank]
                    try:
                        ok, value, trace = worker.connection.recv()
                    except EOFError:
                        worker.process.join(5)
                        ok, value, trace = False, f"Died: exit code {worker.process.exitcode}", ""
                    if ok:
                        results[rank] = value
                    else:
                        errors[rank], traces[rank] = value, trace
        if len(results) == size:
            for worker in self._workers[KEPT:]:
                worker.end()
            del self._workers[KEPT:]
            return [results[rank] for rank in range(size)]
        lines = [f"rank {rank} still running after {timeout} s" for rank in waiting]
        for rank in sorted(errors):
            lines.append(f"--- rank {rank}: {errors[rank]}\n{traces[rank]}\n{workers[rank].stderr_tail()}")
        if waiting or any(not worker.process.is_alive() for worker in workers):
            for worker in workers:
                worker.end()
            # Others keep their places: torch caches what it has worked out for a mesh and a process' rank in it.
            self._workers[:size] = [_Worker(self._spawn) for _ in range(size)]
        raise WorkerError("\n".join(lines), errors)

    def error(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> str:
        """Call `function(*args)` on `size` ranks, all of which have to raise the same; returns "ErrorType: message".

        Raises AssertionError if none raises, WorkerError if some return, die or raise something else.
        """
        try:
            self.run(size, function, *args, timeout=timeout)
        except WorkerError as failed:
            if len(failed.errors) == size and len(set(failed.errors.values())) == 1:
                return failed.errors[0]
            raise
        raise AssertionError(f"no rank of {size} raised")

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()


class _Worker:
    def __init__(self, spawn: bool) -> None:
        context: Any = multiprocessing.get_context("spawn" if spawn else "forkserver")
        self.stderr = tempfile.NamedTemporaryFile("w+", suffix=".stderr")  # noqa: SIM115 - lives as long as the worker
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.stderr.name), daemon=True)
        self.process.start()
        theirs.close()

    def stderr_tail(self, count: int = 4000) -> str:
        with open(self.stderr.name, errors="replace") as file:
            return file.read()[-count:]

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.stderr.close()


def _serve(connection: Connection, stderr: str) -> None:
    """A worker's main loop: receive a call, run it as one rank, send back what came of it."""
    wait_for_no_disk()
    # torch asks for the name of each peer of a store, and waits 5 s where a name server loses the question.
    os.environ["RES_OPTIONS"] = "attempts:0"
    os.dup2(os.open(stderr, os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    gc.freeze()  # what is imported stays; collecting the rest is then cheap
    while True:
        try:
            rank, size, port, function, args = connection.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        store = None
        if rank == 0:
            store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
            connection.send("listens")
        try:
            connection.send((True, function(*args), ""))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}", traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            del store  # which the process group shared
            forget_meshes()
            if "accelerate.state" in sys.modules:  # which remembers the group that has ended
                sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
            gc.collect()  # models are cycles, which keep their process groups, and those their threads


def wait_for_no_disk() -> None:
    """Let saves of this process go on before their bytes are on the disk: no test ends the machine."""
    os.fsync = lambda descriptor: None  # type: ignore[assignment]


def forget_meshes() -> None:
    """Empty torch's caches by mesh: each keeps process groups, whose threads wake 100 times a second."""
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    for module, name in ((debug, "_clear_sharding_prop_cache"), (_redistribute, "clear_redistribute_planner_cache")):
        getattr(module, name, bool)()  # torch 2.8 has neither
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed."):
            for function in list(vars(module).values()):
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()


def free_port() -> int:
    """A TCP port of this machine that nobody uses now.

    It lies below those that the kernel gives to outgoing connections, one of which could take it before a rank does.
    """
    for _ in range(100):
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise OSError("no free port in 100 tries")
