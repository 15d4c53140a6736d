"""The command line: `tp-transformers COMMAND`, or `python -m tp_transformers COMMAND`.

Results go to stdout, everything else to stderr. Exit codes: 0, success; 1, the answer is no; 2, the request cannot be
served, and stderr has the reason and the remedy.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

from .. import __version__
from ..errors import TensorParallelError
from ..seams import FOLDER, features
from . import REFUSED, import_files

COMMANDS: dict[str, Any] = {
    command: import_module(f"..features.{name}{module}", __package__)
    for name, feature in features().items()
    for command, module in feature.commands.items()
}
"""Name -> module; see `Feature.commands`. No module imports torch before it runs, so that `--help` is fast."""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    main_parser = argparse.ArgumentParser(
        prog="tp-transformers", description="Tensor parallelism for Hugging Face Transformers, on any number of ranks."
    )
    libraries = f"torch {_torch_version()}, transformers {metadata.version('transformers')}"
    main_parser.add_argument("--version", action="version", version=f"tp-transformers {__version__} ({libraries})")
    subparsers = main_parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.SUMMARY,
            description=f"{command.SUMMARY[0].upper()}{command.SUMMARY[1:]}.",
            epilog=f"example: {command.EXAMPLE}",
        )
        command.configure(subparser)
        subparser.set_defaults(run=command.run)
    return main_parser


def _torch_version() -> str:
    """Read `torch.__version__` without importing torch: it has the build (`2.15.0+cu132`), which metadata may lack."""
    torch: Any = find_spec("torch")
    return str(run_path(str(Path(torch.origin).with_name("version.py")))["__version__"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    main_parser = parser()
    for word in (sys.argv[1:] if argv is None else argv)[:1]:
        if word not in COMMANDS and not word.startswith("-"):
            choices = f"invalid choice: {word!r} (choose from {', '.join(COMMANDS)})"
            main_parser.error(f"argument COMMAND: {choices}; no folder of {FOLDER} adds it")
    arguments, unknown = main_parser.parse_known_args(argv)
    if unknown and not hasattr(arguments, "options"):
        main_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.options = unknown  # for commands that pass them on
    arguments.log = partial(print, f"tp-transformers {arguments.command}:", file=sys.stderr, flush=True)
    try:
        import_files(getattr(arguments, "imports", ()))
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except TensorParallelError as error:
        print(f"tp-transformers {arguments.command}: {error}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:  # the reader, `head` say, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
