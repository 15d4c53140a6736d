"""The commands of `tp-transformers`, one module or folder each.

A command has `SUMMARY`, a line; `EXAMPLE`, a command line for its help; `configure(parser)`, which adds its arguments;
and `run(arguments)`, which returns the exit code: 0 for yes, 1 for no (a plan that is wrong, a model that does not
fit). A command imports torch and transformers in `run`, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ..errors import UsageError

REFUSED = 2
"""Exit code of a command, and of its ranks, that cannot serve a request."""


def import_files(files: Sequence[str]) -> None:
    """Import each file as a module, from its folder, which other processes then find in `sys.path`.

    Raises UsageError for what is no Python file, or has the name of a module that was imported from elsewhere.
    """
    for file in files:
        path = Path(file).resolve()
        if path.suffix != ".py" or not path.is_file():
            fix = "Name the file that calls register_strategy."
            raise UsageError("--import", got=file, expected="a Python file", fix=fix)
        sys.path.insert(0, str(path.parent))
        module = import_module(path.stem)
        if Path(str(module.__file__)).resolve() != path:
            fix = "Give your file a name of its own."
            raise UsageError("--import", got=f"{file}, and a module {module.__file__}", expected="one", fix=fix)
