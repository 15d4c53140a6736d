"""The command line: `main(["plan", folder])` is `tp-transformers plan FOLDER` in the process of a test."""

import os
import shlex
import sys
from pathlib import Path

from tp_transformers.commands.cli import main

__all__ = ["environment", "main"]

ROOT = Path(__file__).parents[2]


def environment(folder: Path) -> dict[str, str]:
    """Variables for processes that call `tp-transformers`: of this checkout, whatever is installed.

    The program is written to `folder`/bin. Its tables are as wide as into a pipe: pytest-xdist sets COLUMNS.
    """
    program = folder / "bin" / "tp-transformers"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tp_transformers "$@"\n')
    program.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join((str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
