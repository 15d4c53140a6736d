"""Start ranks on this machine with torchrun, and print each error once; they end with the command that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ...ranks.limits import visible_cores
from ..command_line.arguments import SHARES, shares_of
from .errors import FOLDER, error_lines

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): the signal to send to a process when its parent ends."""
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
"""Signals that torchrun passes on to its ranks."""
AGAIN = 1.0
"""Seconds after which a second signal is a second request: timeout(1) sends each to a process and to its group."""
GRACE = 60.0
"""Seconds for torchrun to end its ranks; torchrun itself kills them after 30."""


def end_with_parent(by: signal.Signals = signal.SIGTERM, parent: int | None = None) -> None:
    """Let the kernel end this process when its parent ends, even by SIGKILL; no-op except on Linux.

    Args:
        by: the signal to this process.
        parent: the parent's process id; if the parent has ended already, this process ends at once.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, by)
        if parent not in (None, os.getppid()):
            os.kill(os.getpid(), by)


def torchrun(
    program: Sequence[str],
    *,
    ranks: int,
    timeout: float | None = None,
    output: IO[bytes] | None = None,
    agent: str = "torch.distributed.run",
    environment: Mapping[str, str] | None = None,
    ended_by: signal.Signals | None = None,
) -> int:
    """Run `program` on `ranks` processes; returns the exit code, 128 plus the number of a signal that ended torchrun.

    Each gets cores / ranks threads for torch, unless OMP_NUM_THREADS is set. All ranks end if one of them fails, on a
    signal, after `timeout` seconds, and on Linux if this process ends. On a signal, this process waits for its ranks.

    Args:
        program: a script and its arguments, or `-m` and a module.
        ranks: number of processes.
        timeout: seconds until they are ended.
        output: file for stdout and stderr; None to inherit.
        agent: the module to run as torchrun.
        environment: variables to add to the environment of this process.
        ended_by: the signal to the ranks for every signal that ends this process; None for the same signal.

    Raises:
        subprocess.TimeoutExpired: if the ranks take longer.
        KeyboardInterrupt: after SIGINT, once the ranks have ended.
        SystemExit: after another signal, likewise; the code is 128 plus its number.
    """
    # By number: the name of the host may have no address.
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command = [sys.executable, "-m", agent, *where, f"--nproc-per-node={ranks}", *program]
    # PET_NNODES and others are torchrun's options for a job of a cluster, in which this process may run.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    threads = str(max(1, visible_cores() // ranks))
    with subprocess.Popen(
        command,
        env={"OMP_NUM_THREADS": threads, **inherited, **(environment or {})},
        stdout=output,
        stderr=output,
        preexec_fn=end_with_parent,
        start_new_session=True,  # signals of the terminal reach torchrun once, through this process
    ) as process:
        try:
            with signals_passed_on(process, ended_by) as came:
                code = process.wait(timeout)
        except BaseException:  # torchrun forwards SIGTERM to its ranks; SIGKILL would orphan them
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if came:
        raise KeyboardInterrupt if came[0] == signal.SIGINT else SystemExit(128 + came[0])
    return code if code >= 0 else 128 - code


@contextmanager
def signals_passed_on(process: subprocess.Popen[bytes], ended_by: signal.Signals | None) -> Iterator[list[int]]:
    """Pass signals that would end this process on to `process`; yields the list of those that came.

    The second request is passed on as well, and ends ranks that do not answer the first. Signals that this process
    ignores stay ignored: SIGHUP under nohup, SIGINT of a script's `&`.
    """
    came: list[int] = []
    sent: list[float] = []

    def pass_on(number: int, _: Any) -> None:
        came.append(number)
        now = time.monotonic()
        if not sent or (len(sent) == 1 and now - sent[0] > AGAIN):
            sent.append(now)
            process.send_signal(ended_by or number)

    is_main = threading.current_thread() is threading.main_thread()
    heard = [number for number in ENDING if is_main and signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, pass_on) for number in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(
    program: Sequence[str], *, ranks: int, command: str, verbose: bool, ended_by: signal.Signals | None = None
) -> int:
    """Run `program` on `ranks` processes, and print each error once on stderr; returns an exit code.

    Args:
        program: as `torchrun` takes it.
        command: the name of the command.
        verbose: whether torchrun and every rank print their messages and tracebacks.
        ended_by: as `torchrun` takes it.
    """
    with tempfile.TemporaryDirectory(prefix="tp-errors-") as folder:
        code = torchrun(
            program,
            ranks=ranks,
            agent=f"{__package__}.agent",
            environment={} if verbose else {FOLDER: folder},
            ended_by=ended_by,
        )
        if code and not verbose:
            nothing_said = [f"tp-transformers {command}: torchrun ended with exit code {code}"]
            print(*([*error_lines(Path(folder), command)] or nothing_said), sep="\n", file=sys.stderr)
    return code


def set_shares(text: str | None) -> int | None:
    """Let the ranks that this process starts load with the shares of `text`; returns their number, if it says it.

    Raises PlanError if it is malformed.
    """
    if text is None:
        return None
    shares = shares_of(text, subject="--shares")
    os.environ[SHARES] = text
    return None if isinstance(shares, str) else len(shares)
