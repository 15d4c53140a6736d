"""Start ranks on this machine with torchrun; they end with the command that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): the signal to send to a process when its parent ends."""


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel end this process when its parent ends, even by SIGKILL; no-op except on Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, by)


def torchrun(
    program: Sequence[str],
    *,
    ranks: int,
    timeout: float | None = None,
    output: IO[bytes] | None = None,
    agent: str = "torch.distributed.run",
    environment: Mapping[str, str] | None = None,
    hears_terminal: bool = True,
) -> int:
    """Run `program` on `ranks` processes; returns the exit code.

    Each gets cores / ranks threads for torch, unless OMP_NUM_THREADS is set. All ranks end if one of them fails, on an
    interrupt, after `timeout` seconds, and on Linux if this process ends.

    Args:
        program: a script and its arguments, or `-m` and a module.
        ranks: number of processes.
        timeout: seconds until they are ended.
        output: file for stdout and stderr; None to inherit.
        agent: the module to run as torchrun.
        environment: variables to add to the environment of this process.
        hears_terminal: if True, Ctrl-C reaches the ranks directly, else only this process.

    Raises:
        subprocess.TimeoutExpired: if the ranks take longer.
    """
    command = [sys.executable, "-m", agent, "--standalone", f"--nproc-per-node={ranks}", *program]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    with subprocess.Popen(
        command,
        env={"OMP_NUM_THREADS": threads, **os.environ, **(environment or {})},
        stdout=output,
        stderr=output,
        preexec_fn=end_with_parent,
        start_new_session=not hears_terminal,
    ) as process:
        try:
            return process.wait(timeout)
        except BaseException:  # torchrun forwards SIGTERM to its ranks; SIGKILL would orphan them
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
