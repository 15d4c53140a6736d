"""Launch of a command's ranks on this machine, with each error printed once."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .errors import FOLDER, error_lines
from .launch import torchrun


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
    from ...loading.choose_plan import SHARES  # imports torch
    from ...plans.parse import shares_of

    if text is None:
        return None
    shares = shares_of(text, subject="--shares")
    os.environ[SHARES] = text
    return None if isinstance(shares, str) else len(shares)
