"""`--plan YAML` and `--import FILE`, arguments of several commands: a plan and strategies of one's own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ..errors import UsageError


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", default="auto", metavar="YAML", help="a plan of your own (default: auto)")
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="FILE",
        help="run a Python file first that registers strategies of your own; several may be given",
    )


def passed_on(arguments: argparse.Namespace) -> list[str]:
    """The two as arguments for another process, with full paths."""
    files = [str(Path(file).resolve()) for file in arguments.imports]
    plan = str(Path(arguments.plan).resolve()) if Path(arguments.plan).is_file() else arguments.plan
    return ["--plan", plan, *(part for file in files for part in ("--import", file))]


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
