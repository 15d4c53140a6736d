"""Loading, measured against transformers' own tensor parallelism: `python -m benchmarks load`.

Both sides load the same checkpoint in fresh processes, alternating within one run. Every shard is first compared with
the checkpoint; wrong shards are not timed. A load is timed from a barrier, after the start of the process group and the
imports, until one byte of every page of every parameter has been read, and the slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from . import machine
from .checkpoints import KINDS, ensure, files
from .ranks import in_turn
from .report import MEASURES, at_least, listed, page, summarise
from .sides import Setting, Side, compared


def measure(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure all checkpoints. Raises ProcessError if a load is wrong, fails, or takes too long."""
    result["machine"]["gpu"] = ""
    result |= {"setting": _setting(arguments), "pairs": arguments.pairs, "sides": {}, "models": {}}
    print(f"{result['command']}\n{json.dumps(result['machine'])}", flush=True)
    for model in arguments.models:
        folder = ensure(model, arguments.gigabytes, arguments.folder)
        with compared(arguments, model, folder) as (setting, sides):
            result["sides"] = {name: side.label for name, side in sides.items()}
            result["models"][model] = _measure(arguments, setting, sides, model, folder, result["machine"])


def _measure(
    arguments: argparse.Namespace,
    setting: Setting,
    sides: dict[str, Side],
    model: str,
    folder: Path,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Measure one checkpoint: check both sides, then time them alternately."""
    size = sum(file.stat().st_size for file in files(folder))
    print(f"\n{model}: {size / 1e9:.2f} GB in {len(files(folder))} files", flush=True)
    # 1. A wrong load is not timed.
    for side in sides.values():
        found = setting.run("check", side, arguments.against or folder)[0]
        about["gpu"] = found["device"]
        print(f"  {side.label}: {found['tensors']} tensors equal the checkpoint's", flush=True)

    # 2. Time both.
    def timed(name: str) -> list[dict[str, Any]]:
        read = [path for path in sides[name].folder.rglob("*") if path.is_file()]
        results = []
        for action in ("time", "start"):
            machine.drop(read) if arguments.cold else machine.warm(read)
            results.append(setting.run(action, sides[name], folder))
        ranks = [start | load for load, start in zip(*results, strict=True)]
        print(f"  {name}: {max(rank['load'] for rank in ranks):.3f} s", flush=True)
        return ranks

    runs = in_turn({name: partial(timed, name) for name in sides}, arguments.pairs)
    measures = ["load", "first_forward", "process", "anonymous", "bytes"]
    measures += ["device"] * (arguments.device == "cuda") + ["storage"] * arguments.cold + ["sent"] * arguments.hub
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {
        "checkpoint": {"bytes": size, "files": len(files(folder)), "config": config},
        "measures": summarise(runs, measures),
        "runs": runs,
    }


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all models and measures; the machine and versions are below it."""
    rows = []
    for model, found in result["models"].items():
        checkpoint = f"{model}, {found['checkpoint']['bytes'] / 1e9:.2f} GB"
        for name, numbers in found["measures"].items():
            measure, ratio = MEASURES[name], numbers["ratio"]
            shown = (f"{numbers[side]['median'] / measure.scale:.3g} {measure.unit}" for side in result["sides"])
            spread = f"{ratio['median']:.3g} ({ratio['min']:.3g} to {ratio['max']:.3g})" if ratio else "-"
            rows.append(f"| {checkpoint} | {measure.title} | {' | '.join(shown)} | {spread} |")
    return page(
        result,
        ["checkpoint", "measure", *result["sides"].values(), "ratio: median (min to max)"],
        rows,
        f"{result['setting']}, {result['pairs']} pairs of fresh processes, in turn",
    )


def _setting(arguments: argparse.Namespace) -> str:
    """Describe the run."""
    if arguments.rank is not None:
        where = f"rank {arguments.rank} of {arguments.ranks}, the others faked, on {arguments.device}"
    else:
        where = f"{arguments.ranks} ranks on {arguments.device}"
    return f"{where}, page cache {'dropped before every load' if arguments.cold else 'warm'}"


def file(arguments: argparse.Namespace) -> str:
    """The name of the table."""
    kinds = [name for name in ("hub", "presharded", "cold") if getattr(arguments, name)]
    kinds += [model for model in arguments.models if "-" in model]  # quantised ones have a separate table
    return "-".join(["load", arguments.device, str(arguments.ranks), *kinds])


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Add the options, and read them."""
    add = parser.add_argument
    add("--models", type=listed(KINDS), default="llama,mixtral", help=f"of {','.join(KINDS)} (default: %(default)s)")
    add("--gigabytes", type=float, default=4, help="of each checkpoint (default: 4)")
    add("--ranks", type=at_least(1), default=2, help="(default: 2)")
    add("--pairs", type=at_least(1), default=5, help="how often both sides load (default: 5)")
    add("--cold", action="store_true", help="drop the files from the page cache before every load")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one rank on one GPU, the others faked")
    add("--rank", type=int, help="run only this rank, and fake the others; 0 on cuda unless given")
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument(
        "--hub", action="store_true", help="load over HTTP from this machine, ours with tp_stream=True"
    )
    compared.add_argument("--presharded", action="store_true", help="transformers against ours from save_sharded")
    cache = Path(tempfile.gettempdir()) / "tp_transformers-bench"
    add("--folder", type=Path, default=cache, help=f"where checkpoints are kept (default: {cache})")
    add("--timeout", type=float, default=600, help="seconds that one load may take, its processes' start included")
    add("--against", type=Path, help="hold the loads against this checkpoint, to see that a wrong one is refused")
    arguments = parser.parse_args(argv)
    arguments.folder = arguments.folder.resolve()
    arguments.against = arguments.against and arguments.against.resolve()
    if arguments.device == "cuda" and arguments.rank is None:
        arguments.rank = 0
    if arguments.rank is not None and not 0 <= arguments.rank < arguments.ranks:
        parser.error(f"--rank: got {arguments.rank}, expected 0 to {arguments.ranks - 1}")
    return arguments
