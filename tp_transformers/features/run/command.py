"""`tp-transformers run -n 4 script.py args`: torchrun on this machine, with the hook on."""

from __future__ import annotations

import argparse
import os

from ...errors import UsageError
from ..command_line.arguments import add_shares, count_ranks
from .launch import set_shares, start

NUMA = "TP_TRANSFORMERS_NUMA"
"""Environment variable of a rank; `auto` binds it to the cores of one NUMA node."""
AGENT = "TP_TRANSFORMERS_AGENT"
"""Environment variable of a rank: the process id of the torchrun that started the rank."""

SUMMARY = "run a script, unedited, on N ranks of this machine, with the hook on"
EXAMPLE = "tp-transformers run -n 2 generate.py --prompt 'The sky is'"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="how many ranks share the model")
    add_shares(parser, measured=True)
    parser.add_argument("--verbose", action="store_true", help="all that torchrun and every rank print of an error")
    parser.add_argument(
        "--numa",
        choices=("auto", "off"),
        default="auto",
        help="auto (default): on several NUMA nodes without a GPU, each rank keeps to the cores of one",
    )
    parser.add_argument("script", help="a Python script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the script; returns 0, or the exit code of the rank that failed first."""
    shared = set_shares(arguments.shares)
    has_copies = bool(shared and arguments.ranks and arguments.ranks % shared == 0)
    ranks = count_ranks({"-n": arguments.ranks, "--shares": None if has_copies else shared})
    if not os.path.isfile(arguments.script):
        raise UsageError(
            f"script {arguments.script}", got="no such file", expected="a Python script", fix="Correct the path."
        )
    program = ["-m", f"{__package__}.rank", arguments.script, *arguments.args]
    os.environ[NUMA] = arguments.numa
    return start(program, ranks=ranks, command="run", verbose=arguments.verbose)
