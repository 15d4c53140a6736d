"""`tp-transformers serve` with the option `--elastic`."""

from __future__ import annotations

import argparse
import os

from ...errors import UsageError
from ..command_line.arguments import SHARES, parse_shares, passed_on
from ..serve import command
from ..serve.command import EXAMPLE, SUMMARY
from ..serve.ports import bound

__all__ = ["EXAMPLE", "SUMMARY", "configure", "run"]

REJOIN = 30.0
"""Default seconds until a lost rank is started again."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`, and those of an elastic server."""
    command.configure(parser)
    parser.add_argument("--elastic", action="store_true", help="go on with the ranks that are left when one is lost")
    rejoin = f"with --elastic: seconds until a lost rank is started again, 0 for never (default: {REJOIN:g})"
    parser.add_argument("--rejoin", type=seconds, default=None, metavar="SECONDS", help=rejoin)


def seconds(text: str) -> float:
    """A positive number, or 0. Raises ValueError for all else."""
    return 0.0 if float(text) == 0 else command.seconds(text)


def run(arguments: argparse.Namespace) -> int:
    """Serve; returns the exit code. Raises UsageError as `serve` does, and for `--rejoin` without `--elastic`."""
    if not arguments.elastic:
        if arguments.rejoin is not None:
            raise UsageError("--rejoin", got="no --elastic", expected="both", fix="Add --elastic.")
        return command.run(arguments)
    shares = parse_shares(arguments.shares)
    command.check(arguments)
    for listener in bound(*command.address(arguments.options)):
        listener.close()
    from .agent import Agent  # imports torch

    os.environ.pop(SHARES, None)  # those of all ranks

    ours = [*passed_on(arguments), *command.own(arguments)]
    program = ["-m", f"{__package__}.rank", *ours, "--", arguments.model, *arguments.options]
    arguments.log(f"{arguments.ranks} ranks of {arguments.model} are starting")
    rejoin = REJOIN if arguments.rejoin is None else arguments.rejoin
    return Agent(program, arguments, shares=shares, rejoin=rejoin).run()
