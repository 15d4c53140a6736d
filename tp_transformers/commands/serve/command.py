"""`tp-transformers serve MODEL -n 2`: transformers' OpenAI-compatible server, on a model that N ranks share."""

from __future__ import annotations

import argparse
import signal
import sys
from importlib.util import find_spec

from ...errors import UsageError
from ...ranks.launch import torchrun

SUMMARY = "serve a model on N ranks of this machine, by transformers' own OpenAI-compatible server"
EXAMPLE = "tp-transformers serve HuggingFaceTB/SmolLM2-135M-Instruct -n 2 --port 8000"


def configure(parser: argparse.ArgumentParser, passes_on_to: str = "transformers serve") -> None:
    """Add the model and its ranks; `passes_on_to` is the command that takes all other options."""
    parser.add_argument("model", help="a folder or a name on the Hub")
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="how many ranks share the model")
    parser.set_defaults(options=[])
    parser.epilog = f"All other options are those of `{passes_on_to}`. {parser.epilog}"


def check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for a number of ranks that is none, and where packages of a server are missing."""
    if arguments.ranks < 1:
        raise UsageError("-n", got=str(arguments.ranks), expected="1 or more", fix="Give a number of ranks.")
    missing = [name for name in ("fastapi", "uvicorn", "openai") if find_spec(name) is None]
    if missing:
        raise UsageError(
            "packages", got=f"no {', '.join(missing)}", expected="them", fix='pip install "transformers[serving]"'
        )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal, or until a rank fails; returns torchrun's exit code."""
    check(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks end, too
    program = ["-m", f"{__package__}.rank", arguments.model, *arguments.options]
    return torchrun(program, ranks=arguments.ranks)
