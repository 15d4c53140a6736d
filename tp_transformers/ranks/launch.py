"""Start ranks on this machine: torchrun, with an end for each of them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): the signal that a process gets when its parent ends."""


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel end this process when its parent ends, even by SIGKILL; elsewhere than on Linux, do nothing."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, by)


def torchrun(
    program: Sequence[str], *, ranks: int, timeout: float | None = None, output: IO[bytes] | None = None
) -> int:
    """Run `program` (a script and its arguments, or `-m` and a module) on `ranks` processes; returns the exit code.

    torch gets its share of the cores in each, unless OMP_NUM_THREADS says otherwise. If one rank fails, torchrun ends
    the others; so does an interrupt, the end of `timeout` seconds, or on Linux that of this process. Their output goes
    to `output`, if given.

    Raises:
        subprocess.TimeoutExpired: if the ranks take longer.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program]
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), **os.environ}
    with subprocess.Popen(
        command, env=environment, stdout=output, stderr=output, preexec_fn=end_with_parent
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
