"""Ranks on this machine for a command: torchrun starts them, and they end with the command."""

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
"""Option of Linux's prctl(2): the signal that a process gets when its parent ends."""


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel end this process when its parent ends, even by SIGKILL; elsewhere than on Linux, do nothing."""
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

    torch gets its share of the cores in each, unless OMP_NUM_THREADS says otherwise. If one rank fails, torchrun ends
    the others; so does an interrupt, the end of `timeout` seconds, or on Linux that of this process.

    Args:
        program: a script and its arguments, or `-m` and a module.
        ranks: their number.
        timeout: seconds that they may take.
        output: the file of their output; None for this process' own.
        agent: the module that is torchrun.
        environment: variables beside those of this process.
        hears_terminal: whether Ctrl-C reaches the ranks themselves, or this process alone.

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
        except BaseException:  # torchrun passes a SIGTERM on to its ranks; a SIGKILL would leave them behind
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
