"""Computing, measured against transformers' tensor parallelism and one process: `python -m benchmarks forward`.

Every rank holds the same random model three times: sharded by a plan of this package, sharded by transformers, and
unsharded. Outputs are compared first; a side with wrong logits, or that cannot be loaded, is not timed. Then the sides
alternate, so that drift of the machine favours none, and the slowest rank counts. The unsharded model runs on all ranks
simultaneously, each with its cores, and on the first rank with all cores, while the others sleep.

With `--fake`, collectives return immediately (torch's fake backend), and the reference is a plain model with the shapes
of one rank: the ratio measures the overhead beside arithmetic. `--device cuda` computes on GPUs; with `--fake`, one GPU
is "rank 0 of N".
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from . import machine, processes
from .forward import MODELS, SCENARIOS, WIDTHS
from .report import page, shown_spread, slowest, spread, spread_of_ratios


def measure(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure all models. Raises ProcessError if a process fails or takes too long."""
    result |= {name: getattr(arguments, name) for name in ("device", "fake", "widths", "rounds")} | {"models": {}}
    for model in arguments.models:
        for size in arguments.ranks:
            ranks = _run(arguments, model, size)
            result["models"].setdefault(model, {})[str(size)] = found = _summary(ranks)
            for line in _lines(model, size, found):
                print(line, flush=True)


def file(arguments: argparse.Namespace) -> str:
    """The name of the table."""
    kinds = [*["fake"] * arguments.fake, *["compiled"] * arguments.compiled]
    kinds += [arguments.widths] if arguments.widths != ("tiny" if arguments.fake else "real") else []
    return "-".join(["forward", arguments.device, *kinds])


def _run(arguments: argparse.Namespace, model: str, size: int) -> list[dict[str, Any]]:
    """The results of the ranks for one model; a single rank with fake collectives."""
    with tempfile.TemporaryDirectory() as scratch:
        job = {
            "model": model,
            "folder": scratch,
            "size": size,
            "store": "" if arguments.fake else f"{scratch}/store",
            "cores": machine.facts()["cores"],
            **{name: getattr(arguments, name) for name in ("device", "rounds", "scenarios", "compiled", "widths")},
        }
        # Waiting threads would use CPU time of the process, which is measured with fake collectives.
        options: dict[str, Any] = {"ranks": [0], "threads": 1} if arguments.fake else {}
        return processes.run_ranks("benchmarks.forward:on_rank", job, timeout=arguments.timeout, **options)


def _summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """For each scenario, the seconds of each side on the slowest rank, and by round the ratios to this package."""
    found: dict[str, Any] = {"errors": ranks[0]["errors"], "refused": ranks[0]["refused"], "scenarios": {}}
    for name in ranks[0]["seconds"]:
        seconds = slowest([rank["seconds"][name] for rank in ranks])
        others = {side: values for side, values in seconds.items() if side != "ours"}
        found["scenarios"][name] = {
            "seconds": {side: spread(values) for side, values in seconds.items()},
            "ratios": {side: spread_of_ratios(values, seconds["ours"]) for side, values in others.items()},
            "collectives": ranks[0]["collectives"][name],
        }
    return found


def _lines(model: str, size: int, found: dict[str, Any]) -> list[str]:
    lines = [f"{model}, {size} ranks: {side} is not timed: {why}" for side, why in found["refused"].items()]
    for name, scenario in found["scenarios"].items():
        sides = ", ".join(f"{side} {at['median'] * 1e3:.1f} ms" for side, at in scenario["seconds"].items())
        ratios = ", ".join(f"{side} {at['median']:.2f}" for side, at in scenario["ratios"].items())
        lines.append(f"{model}, {size} ranks, {name}: {sides}; times ours: {ratios}")
    return lines


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all models, numbers of ranks and scenarios; the machine and versions are below it."""
    alone = "plain" if result["fake"] else "alone"
    rows, refused = [], []
    for model, sizes in result["models"].items():
        for size, found in sizes.items():
            refused += [f"{model}, {size} ranks: {side} is not timed: {why}" for side, why in found["refused"].items()]
            for name, scenario in found["scenarios"].items():
                counts = scenario["collectives"].get("ours", {})
                told = f"{counts.get('all_reduce', 0)}, {sum(counts.values()) - counts.get('all_reduce', 0)}"
                ratios = " | ".join(_ratio(scenario["ratios"].get(side)) for side in ("native", alone))
                ours = scenario["seconds"]["ours"]["median"] * 1e3
                rows.append(f"| {model} | {size} | {name} | {ours:.1f} ms | {ratios} | {told} |")
    columns = ["model", "ranks", "scenario", "here", "transformers by here", "one process, all cores"]
    return page(
        result,
        [*columns, "all-reduces, others (here)"],
        rows,
        f"{result['rounds']} rounds, the sides in turn, the slowest rank",
        "ratio: seconds by ours, median (min to max) of rounds; above 1, this is faster"
        + (". Collectives return at once; one process is a plain model of the local shapes" if result["fake"] else ""),
        f"{result['widths']} widths: {', '.join(f'{name} {n}' for name, n in WIDTHS[result['widths']].items())}; fp32",
        *sorted(refused),
    )


def _ratio(found: dict[str, Any] | None) -> str:
    return "-" if found is None else shown_spread(found)


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Add the options, and read them."""
    add = parser.add_argument
    add("--models", default="llama", help=f"of {','.join(MODELS)} (default: llama)")
    add("--ranks", default="1,2", help="numbers of ranks (default: 1,2)")
    add("--scenarios", default=",".join(SCENARIOS), help=f"of {','.join(SCENARIOS)} (default: all)")
    add("--rounds", type=int, default=9, help="how often every side computes (default: 9)")
    add("--widths", choices=WIDTHS, help="of the models (default: real; tiny where collectives are faked)")
    add("--compiled", action="store_true", help="forwards through torch.compile")
    add("--fake", action="store_true", help="collectives return at once: the cost beside arithmetic")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--timeout", type=float, default=900, help="seconds that one model on one number of ranks may take")
    arguments = parser.parse_args(argv)
    for option, known in (("models", MODELS), ("scenarios", SCENARIOS)):
        names = getattr(arguments, option).split(",")
        if unknown := set(names) - set(known):
            parser.error(f"--{option}: got {', '.join(sorted(unknown))}, expected some of {', '.join(known)}")
        setattr(arguments, option, names)
    arguments.widths = arguments.widths or ("tiny" if arguments.fake else "real")
    arguments.ranks = [int(size) for size in arguments.ranks.split(",") if size.isdigit()]
    if not arguments.ranks or min(arguments.ranks) < 1 or arguments.rounds < 1:
        parser.error("--ranks and --rounds: expected numbers of 1 or more")
    return arguments
