"""Launch of a command's ranks on this machine, with each error printed once."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...ranks.launch import torchrun
from .errors import FOLDER, error_lines


def start(program: Sequence[str], *, ranks: int, command: str, verbose: bool, hears_terminal: bool = True) -> int:
    """Run `program` on `ranks` processes, and print each error once on stderr; returns an exit code.

    Args:
        program: as `torchrun` takes it.
        command: the name of the command.
        verbose: whether torchrun and every rank print their messages and tracebacks.
        hears_terminal: as `torchrun` takes it.
    """
    if verbose:
        return torchrun(program, ranks=ranks, hears_terminal=hears_terminal)
    with tempfile.TemporaryDirectory(prefix="tp-errors-") as folder:
        code = torchrun(
            program,
            ranks=ranks,
            agent=f"{__package__}.agent",
            environment={FOLDER: folder},
            hears_terminal=hears_terminal,
        )
        if code:
            print(*error_lines(Path(folder), command), sep="\n", file=sys.stderr)
    return code
