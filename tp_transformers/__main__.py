"""`python -m tp_transformers COMMAND ...`, and `torchrun ... -m tp_transformers script.py args`.

The latter runs an unedited script with `enable()` called.
"""

from __future__ import annotations

import os
import runpy
import sys

from .commands.cli import COMMANDS
from .commands.cli import main as run_command

USAGE = """usage: torchrun --nproc-per-node N -m tp_transformers (script.py | -m module) [args ...]
       python -m tp_transformers COMMAND ..., also named tp-transformers; see its --help"""


def main(argv: list[str]) -> None:
    """Run a command, a script (`argv[0]`) or a module (`-m`, `argv[1]`) as `__main__`, with the remaining arguments."""
    if argv and argv[0] in COMMANDS:
        sys.exit(run_command(argv))
    if argv[:1] in (["-h"], ["--help"], ["--version"]):
        if argv != ["--version"]:
            print(USAGE)
        sys.exit(run_command(argv))
    if not argv or argv == ["-m"]:
        print(USAGE, file=sys.stderr)
        sys.exit(2)
    is_module = argv[0] == "-m"
    if not is_module and not os.path.isfile(argv[0]):
        print(f"tp_transformers: no script and no command {argv[0]!r}\n{USAGE}", file=sys.stderr)
        sys.exit(2)
    from .loading import forgotten, hook  # imports torch

    forgotten.CALLED.add("script")
    hook.enable()
    if is_module:
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
