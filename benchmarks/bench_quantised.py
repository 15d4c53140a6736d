"""Computing with packed weights, against the same weights dequantised: `python -m benchmarks quantised`.

Every rank loads a checkpoint of random integers twice, packed and dequantised to bfloat16, and compares the logits of
both with those of a dequantised model in fp32. Then a decode step and a prefill are timed, the sides in turn. On one
rank, transformers computes too, with the format's own package, if that is installed and works on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from . import processes
from .quantised import ALL_EXPERTS, DEQUANTISED, FORMATS, GROUP, MXFP4, PACKED, STEPS, WIDTHS, Job
from .report import shown_machine, shown_spread, slowest, spread


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Add the options, and read them."""
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 3], help="numbers of ranks (default: 1 2 3)")
    add("--rounds", type=int, default=5, help="how often every side computes (default: 5)")
    add("--formats", nargs="+", choices=[*FORMATS, MXFP4], default=[*FORMATS, MXFP4])
    add("--widths", nargs="+", choices=WIDTHS, default=["9/3"], help="query/KV heads, or a width (default: 9/3)")
    add("--timeout", type=float, default=600, help="seconds that one checkpoint may take")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure all formats. Raises ProcessError if a process fails or takes too long."""
    result |= {"rounds": arguments.rounds, "rows": []}
    for widths in arguments.widths:
        for name in arguments.formats:
            if name == MXFP4 and widths != arguments.widths[0]:  # it has a shape of its own
                continue
            for size in arguments.ranks:
                result["rows"].append(summary(name, widths, size, _run(arguments, name, widths, size)))
                print(_line(result["rows"][-1]), flush=True)


def file(arguments: argparse.Namespace) -> str:
    """The name of the table."""
    return "quantised-cpu"


def _run(arguments: argparse.Namespace, name: str, widths: str, size: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(format=name, widths=widths, folder=f"{scratch}/model", size=size, rank=0, rounds=arguments.rounds)
        return processes.run_ranks("benchmarks.quantised", job, timeout=arguments.timeout)


def summary(name: str, widths: str, size: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of each side's seconds to those of the dequantised weights, the slowest rank; the most bytes of a rank."""
    found: dict[str, Any] = {"format": name, "widths": widths, "ranks": size, "ratios": {}, "seconds": {}}
    for scenario in ranks[0]["seconds"]:
        seconds = slowest([rank["seconds"][scenario] for rank in ranks])
        base = seconds[DEQUANTISED]
        found["seconds"][scenario] = {side: spread(values) for side, values in seconds.items()}
        found["ratios"][scenario] = {
            side: spread([took / dense for took, dense in zip(values, base, strict=True)])
            for side, values in seconds.items()
            if side != DEQUANTISED
        }
    for kind in ("held", "read"):
        found[kind] = {side: max(rank[kind][side] for rank in ranks) for side in (PACKED, DEQUANTISED)}
    found["errors"] = {side: max(rank["errors"][side] for rank in ranks) for side in ranks[0]["errors"]}
    return found | {"refused": ranks[0]["refused"]}


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all rows; the machine and versions are below it."""
    lines = [
        "| format | shape | ranks | decode | prefill of 512 | transformers: decode, prefill | held | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(_line, result["rows"]),
    ]
    about = result["machine"]
    refused = {row["format"]: why for row in result["rows"] for why in row["refused"].values()}
    remarks = [
        "decode, prefill: seconds of packed weights / of the same weights dequantised to bfloat16, the slowest rank, "
        f"median (min to max) of {result['rounds']} rounds, the sides in turn; a decode is the mean of {STEPS} steps; "
        f"gloo ranks with one thread each; {about['date']}",
        *(
            f"{row['format']}, {row['ranks']} ranks, {ALL_EXPERTS} in each module: "
            + ", ".join(f"{name} {shown_spread(found[ALL_EXPERTS])}" for name, found in row["ratios"].items())
            for row in result["rows"]
            if ALL_EXPERTS in row["ratios"]["decode"]
        ),
        f"int4, gptq, awq: groups of {GROUP}; int8: a scale per row; nf4: blocks of 64; fp8: blocks of {GROUP} x "
        f"{GROUP}; mxfp4: GPT-OSS, 32 experts, 4 of them for a token",
        "held: most bytes of a rank, packed / dequantised; error: largest difference of logits to those of fp32, "
        "relative to the largest logit, packed / dequantised",
        *(f"{name}: transformers is not timed: {why}" for name, why in refused.items()),
        shown_machine(about),
        f"`{result['command']}`",
    ]
    return "\n".join([*lines, "", *(f"- {line}" for line in remarks)]) + "\n"


def _line(row: dict[str, Any]) -> str:
    ratios = row["ratios"]
    others = [shown_spread(found["transformers"]) for found in ratios.values() if "transformers" in found]
    cells = [row["format"], row["widths"] if row["format"] != MXFP4 else "experts", str(row["ranks"])]
    cells += [shown_spread(found[PACKED]) for found in ratios.values()]
    cells += [", ".join(others) or "-"]
    packed, dequantised = (row["held"][side] / 1e6 for side in (PACKED, DEQUANTISED))
    cells.append(f"{packed:.1f} / {dequantised:.1f} MB")
    cells.append(" / ".join(f"{row['errors'][side]:.1e}" for side in (PACKED, DEQUANTISED)))
    return f"| {' | '.join(cells)} |"
