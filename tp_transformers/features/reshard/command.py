"""`tp-transformers reshard-plan MODEL --tp-size 3 --to 2`: what each rank would copy, get and read."""

from __future__ import annotations

import argparse
from collections import Counter

from ..command_line.arguments import add_dtype, add_plan, parse_dtype, parse_shares

SUMMARY = "say what would move if a loaded model went to other ranks, from config and headers alone"
EXAMPLE = "tp-transformers reshard-plan meta-llama/Llama-3.1-70B --tp-size 4 --to 3 --lost 2"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hub; a config alone will do")
    parser.add_argument("--tp-size", required=True, metavar="N", help="the ranks that have the model; shares as 2,1,1")
    parser.add_argument("--to", required=True, metavar="M", help="the ranks that get it; shares as 2,1")
    parser.add_argument(
        "--lost", default="", metavar="A,B,...", help="ranks that are gone; those left are counted anew"
    )
    parser.add_argument("--link", type=float, default=10.0, metavar="GB/S", help="between two ranks (default 10)")
    parser.add_argument("--disk", type=float, default=2.0, metavar="GB/S", help="reads of the checkpoint (default 2)")
    add_plan(parser)
    add_dtype(parser)
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the repository's own")


def run(arguments: argparse.Namespace) -> int:
    """Print the bytes of each new rank by their source, and seconds."""
    from dataclasses import replace

    from ...anatomy import tied_parameters
    from ...errors import size
    from ...plans.bind import resolve
    from ..planner.dry_load import survey
    from .pieces import CHECKPOINT
    from .table import Entry, describe_sources

    before, after = _ranks("--tp-size", arguments.tp_size), _ranks("--to", arguments.to)
    lost = {_number("--lost", text) for text in arguments.lost.split(",") if text}
    left = [rank for rank in range(before[0]) if rank not in lost]
    old = dict(enumerate(left))
    surveyed = survey(
        arguments.model,
        tp_plan=arguments.plan,
        dtype=parse_dtype(arguments.dtype),
        where={"trust_remote_code": arguments.trust_remote_code},
    )
    model, plan = surveyed.model, surveyed.plan.with_options(allow_replicated=True)
    layouts = [resolve(replace(plan, shares=shares), model, count).layouts for count, shares in (before, after)]
    tied = tied_parameters(model)
    table = {
        name: Entry(tuple(tensor.shape), surveyed.dtypes.get(name, tensor.dtype), layouts[0].get(name))
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in tied
    }
    totals = Counter[tuple[int, int]]()
    for counts in describe_sources(table, layouts[1], old, range(after[0])).values():
        totals.update(counts)
    print(
        f"{arguments.model} from {arguments.tp_size} to {arguments.to}" + (f", without {sorted(lost)}" if lost else "")
    )
    print("rank  was here    from ranks  from the checkpoint")
    traffic, reads = Counter[int](), Counter[int]()
    for rank in range(after[0]):
        here, checkpoint = totals[rank, rank], totals[CHECKPOINT, rank]
        reads[rank] = checkpoint
        for sender in set(old) - {rank}:
            traffic[rank] += totals[sender, rank]
            traffic[sender] += totals[sender, rank]
        received = sum(totals[sender, rank] for sender in old if sender != rank)
        print(f"{rank:4}  {size(here):10}  {size(received):10}  {size(checkpoint)}")
    links, disk = (max(counts.values(), default=0) / 1e9 for counts in (traffic, reads))
    seconds = links / arguments.link + disk / arguments.disk
    print(f"about {seconds:.2f} s at {arguments.link:g} GB/s between ranks and {arguments.disk:g} GB/s from the files")
    return 0


def _ranks(argument: str, text: str) -> tuple[int, tuple[float, ...] | None]:
    """Parse the number of ranks, or their shares."""
    if "," in text:
        shares = parse_shares(text)
        return len(shares or ()), shares
    return _number(argument, text, least=1), None


def _number(argument: str, text: str, least: int = 0) -> int:
    from ...errors import UsageError

    if not text.strip().isdecimal() or int(text) < least:
        raise UsageError(argument, got=repr(text), expected="a number of ranks, or ranks", fix="Give such numbers.")
    return int(text)
