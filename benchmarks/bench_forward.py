"""Computing, measured against transformers' tensor parallelism and one process: `python -m benchmarks forward`.

Every rank holds the same random model three times: sharded by a plan of this package, sharded by transformers, and
unsharded. Outputs are compared first; a side with wrong logits, or that cannot be loaded, is not timed. Then the sides
alternate, so that drift of the machine favours none, and the slowest rank counts. The unsharded model runs on all ranks
simultaneously, each with its cores, and on the first rank with all cores, while the others sleep.

With `--fake`, collectives return immediately (torch's fake backend), and the reference is a plain model with the shapes
of one rank: the ratio measures the overhead beside arithmetic.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from typing import Any

from . import machine, processes
from .forward import MODELS, SCENARIOS, WIDTHS
from .report import at_least, compared, listed, numbers, page, shown_spread


def measure(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure all models. Raises ProcessError if a process fails or takes too long."""
    result |= {name: getattr(arguments, name) for name in ("fake", "widths", "rounds")} | {"models": {}}
    for model in arguments.models:
        for size in arguments.ranks:
            found = _summary(_run(arguments, model, size))
            result["models"].setdefault(model, {})[str(size)] = found
            print(*_rows(model, str(size), found), *_refused(model, str(size), found), sep="\n", flush=True)


def file(arguments: argparse.Namespace) -> str:
    """The name of the table."""
    kinds = [*["fake"] * arguments.fake, *["compiled"] * arguments.compiled]
    kinds += [arguments.widths] if arguments.widths != ("tiny" if arguments.fake else "real") else []
    return "-".join(["forward-cpu", *kinds])


def _run(arguments: argparse.Namespace, model: str, size: int) -> list[dict[str, Any]]:
    """The results of the ranks for one model; a single rank with fake collectives."""
    with tempfile.TemporaryDirectory() as scratch:
        job = {
            "model": model,
            "folder": scratch,
            "size": size,
            "store": "" if arguments.fake else f"{scratch}/store",
            "cores": machine.facts()["cores"],
            **{name: getattr(arguments, name) for name in ("rounds", "scenarios", "compiled", "widths")},
        }
        # Waiting threads would use CPU time of the process, which is measured with fake collectives.
        options: dict[str, Any] = {"ranks": [0], "threads": 1} if arguments.fake else {}
        return processes.run_ranks("benchmarks.forward:on_rank", job, timeout=arguments.timeout, **options)


def _summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """For each scenario, the seconds of each side on the slowest rank, and by round the ratios to this package."""
    scenarios = {
        name: {**compared([rank["seconds"][name] for rank in ranks], "ours"), "collectives": counts}
        for name, counts in ranks[0]["collectives"].items()
    }
    return {"errors": ranks[0]["errors"], "refused": ranks[0]["refused"], "scenarios": scenarios}


def _rows(model: str, size: str, found: dict[str, Any]) -> Iterator[str]:
    """Rows of the table. One process is the plain model, where collectives are faked."""
    for name, scenario in found["scenarios"].items():
        counts, ratios = scenario["collectives"].get("ours", {}), scenario["ratios"]
        told = f"{counts.get('all_reduce', 0)}, {sum(counts.values()) - counts.get('all_reduce', 0)}"
        others = (ratios.get("native"), ratios.get("alone", ratios.get("plain")))
        shown = " | ".join(shown_spread(ratio) if ratio else "-" for ratio in others)
        ours = scenario["seconds"]["ours"]["median"] * 1e3
        yield f"| {model} | {size} | {name} | {ours:.1f} ms | {shown} | {told} |"


def _refused(model: str, size: str, found: dict[str, Any]) -> list[str]:
    return [f"{model}, {size} ranks: {side} is not timed: {why}" for side, why in found["refused"].items()]


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all models, numbers of ranks and scenarios; the machine and versions are below it."""
    runs = [(model, size, found) for model, sizes in result["models"].items() for size, found in sizes.items()]
    columns = ["model", "ranks", "scenario", "here", "transformers by here", "one process, all cores"]
    return page(
        result,
        [*columns, "all-reduces, others (here)"],
        [row for run in runs for row in _rows(*run)],
        f"{result['rounds']} rounds, the sides in turn, the slowest rank",
        "ratio: seconds by ours, median (min to max) of rounds; above 1, this is faster"
        + (". Collectives return at once; one process is a plain model of the local shapes" if result["fake"] else ""),
        f"{result['widths']} widths: {', '.join(f'{name} {n}' for name, n in WIDTHS[result['widths']].items())}; fp32",
        *sorted(line for run in runs for line in _refused(*run)),
    )


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Add the options, and read them."""
    add = parser.add_argument
    add("--models", type=listed(MODELS), default="llama", help=f"of {','.join(MODELS)} (default: llama)")
    add("--ranks", type=numbers, default="1,2", help="numbers of ranks (default: 1,2)")
    known = ",".join(SCENARIOS)
    add("--scenarios", type=listed(SCENARIOS), default=known, help=f"of {known} (default: all)")
    add("--rounds", type=at_least(1), default=9, help="how often every side computes (default: 9)")
    add("--widths", choices=WIDTHS, help="of the models (default: real; tiny where collectives are faked)")
    add("--compiled", action="store_true", help="forwards through torch.compile")
    add("--fake", action="store_true", help="collectives return at once: the cost beside arithmetic")
    add("--timeout", type=float, default=900, help="seconds that one model on one number of ranks may take")
    arguments = parser.parse_args(argv)
    arguments.widths = arguments.widths or ("tiny" if arguments.fake else "real")
    return arguments
