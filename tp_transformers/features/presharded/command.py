"""`tp-transformers shard MODEL OUT --tp-size N`: write a pre-sharded checkpoint for N ranks in one process."""

from __future__ import annotations

import argparse
import sys

from ..command_line.arguments import add_plan, add_shares, count_ranks, parse_shares

SUMMARY = "shard a checkpoint for N ranks, one file a rank, in this process alone, one parameter after the other"
EXAMPLE = "tp-transformers shard Qwen/Qwen3-8B sharded --tp-size 4"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder, or a name on the Hub")
    parser.add_argument("folder", metavar="OUT", help="where to; made if needed")
    parser.add_argument("--tp-size", type=int, metavar="N", help="how many ranks will load it")
    add_shares(parser)
    add_plan(parser)
    parser.add_argument(
        "--dtype",
        choices=["auto", "bfloat16", "float16", "float32"],
        default="auto",
        help="what ranks hold weights in (default: auto, the checkpoint's own)",
    )
    parser.add_argument("--packed", action="store_true", help="quantised weights stay packed (tp_dequantize=False)")
    parser.add_argument("--allow-replicated", action="store_true", help="as in from_pretrained")
    parser.add_argument("--revision", help="a branch, tag or commit of a name on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the repository's own")
    parser.add_argument("--stream", action="store_true", help="read a name on the Hub without storing its files")


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print their names."""
    from ...errors import size
    from .offline import shard_checkpoint

    shares = parse_shares(arguments.shares)
    where = {} if arguments.revision is None else {"revision": arguments.revision}
    manifest = shard_checkpoint(
        arguments.model,
        arguments.folder,
        size=count_ranks({"--tp-size": arguments.tp_size, "--shares": len(shares) if shares else None}),
        plan=arguments.plan,
        show_progress=sys.stderr.isatty(),
        log=arguments.log,
        dtype=arguments.dtype,
        tp_dequantize=not arguments.packed,
        trust_remote_code=arguments.trust_remote_code,
        **where,
        **({"allow_replicated": True} if arguments.allow_replicated else {}),
        **({"tp_stream": True} if arguments.stream else {}),
        **({"tp_shares": shares} if shares else {}),
    )
    for file in manifest.files:
        print(f"{size(file.size)}  {manifest.folder / file.name}")
    return 0
