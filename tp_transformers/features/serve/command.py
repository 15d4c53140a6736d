"""`tp-transformers serve MODEL -n 2`: transformers' OpenAI-compatible server, on N ranks."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from importlib.util import find_spec

from ...errors import UsageError, is_path
from ..command_line.arguments import add_dtype, add_plan, add_shares, count_ranks, passed_on
from ..run.launch import set_shares, start
from .ports import bound

SUMMARY = "serve a model on N ranks of this machine, by transformers' own OpenAI-compatible server"
EXAMPLE = "tp-transformers serve HuggingFaceTB/SmolLM2-135M-Instruct -n 2 --port 8000"

HOST, PORT = "localhost", 8000
"""Defaults of transformers' server."""
DRAIN, WATCH = 20.0, 10.0
"""Defaults of `add_own`."""
STOP = 5.0
"""Seconds for what remains of requests and of a batch after the time to finish them."""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable with the seconds after which torchrun kills its ranks; 30 by default."""


def configure(parser: argparse.ArgumentParser, passes_on_to: str = "transformers serve") -> None:
    """Add the arguments; `passes_on_to` is the command that takes all other options."""
    parser.add_argument("model", help="a folder or a name on the Hub")
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="how many ranks share the model")
    add_shares(parser, measured=True)
    add_plan(parser)
    add_own(parser)
    parser.add_argument("--verbose", action="store_true", help="all that torchrun and every rank print of an error")
    parser.set_defaults(options=[])
    parser.epilog = f"All other options are those of `{passes_on_to}`. {parser.epilog}"


def add_own(parser: argparse.ArgumentParser) -> None:
    drain = f"seconds for requests after a signal that ends the server (default: {DRAIN:g})"
    watch = f"seconds after which a rank that is silent, as if stopped, ends the server (default: {WATCH:g})"
    parser.add_argument("--drain", type=seconds, default=DRAIN, metavar="SECONDS", help=drain)
    parser.add_argument("--watch", type=seconds, default=WATCH, metavar="SECONDS", help=watch)
    parser.add_argument("--packed", action="store_true", help="quantised weights stay packed (tp_dequantize=False)")
    add_dtype(parser)


def seconds(text: str) -> float:
    """A positive number. Raises ValueError for all else."""
    if not 0 < float(text) < float("inf"):
        raise ValueError(text)
    return float(text)


def own(arguments: argparse.Namespace) -> list[str]:
    """The arguments of `add_own` for another process."""
    packed = ["--packed"] if arguments.packed else []
    return ["--drain", str(arguments.drain), "--watch", str(arguments.watch), "--dtype", arguments.dtype, *packed]


def check(arguments: argparse.Namespace) -> None:
    """Complete the number of ranks.

    Raises UsageError if it is not positive, for a folder that does not exist, or if packages of the server are missing.
    """
    if is_path(arguments.model) and not os.path.exists(arguments.model):
        fix = "Correct the path, or name a model on the Hub (org/name)."
        raise UsageError(arguments.model, got="no such folder", expected="a folder with config.json", fix=fix)
    arguments.ranks = count_ranks({"-n": arguments.ranks, "--shares": set_shares(arguments.shares)})
    missing = [name for name in ("fastapi", "uvicorn", "openai") if find_spec(name) is None]
    if missing:
        raise UsageError(
            "packages", got=f"no {', '.join(missing)}", expected="all", fix='pip install "transformers[serving]"'
        )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal, or until a rank fails; returns the exit code of the first rank that failed.

    Raises UsageError if the port is in use. The ranks raise it for a missing model or an unknown option, before they
    load anything.
    """
    check(arguments)
    for listener in bound(*address(arguments.options)):
        listener.close()
    ours = [*passed_on(arguments), *own(arguments)]
    program = ["-m", f"{__package__}.rank", *ours, "--", arguments.model, *arguments.options]
    os.environ[SHUTDOWN] = str(int(arguments.drain + 2 * STOP))
    arguments.log(f"{arguments.ranks} {'rank' if arguments.ranks == 1 else 'ranks'} of {arguments.model} are starting")
    # On Ctrl-C, each rank would print a traceback.
    return start(program, ranks=arguments.ranks, command="serve", verbose=arguments.verbose, ended_by=signal.SIGTERM)


def address(options: Sequence[str]) -> tuple[str, int]:
    """Host and port among the options of `transformers serve`, without importing its parser, which takes seconds."""
    parser = argparse.ArgumentParser("tp-transformers serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default=HOST)
    parser.add_argument("--port", type=int, default=PORT)
    known, _ = parser.parse_known_args(options)
    return known.host, known.port
