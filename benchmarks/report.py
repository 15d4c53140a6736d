"""The report of measurements: measures of each run, ratios of pairs with their spread, a Markdown table."""

from __future__ import annotations

import json
import statistics
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Run = Sequence[dict[str, Any]]
"""The results of all ranks of one load."""


@dataclass(frozen=True)
class Measure:
    """One number of a run, computed from the results of its ranks."""

    title: str
    unit: str
    scale: float
    """Base units (seconds, bytes) per `unit`."""
    of: Callable[[Run], float]


MEASURES = {
    "load": Measure("load", "s", 1, lambda run: max(rank["load"] for rank in run)),
    "first_forward": Measure(
        "load and first forward", "s", 1, lambda run: max(rank["load"] + rank["forward"] for rank in run)
    ),
    "process": Measure(
        "process start to the end of the first forward",
        "s",
        1,
        lambda run: max(rank["process"] for rank in run),
    ),
    "anonymous": Measure(
        "peak anonymous memory above the shard, worst rank",
        "MB",
        1e6,
        lambda run: max(rank["anon_peak"] - rank["anon_start"] - rank["anonymous_shard"] for rank in run),
    ),
    "device": Measure(
        "peak device memory above the shard",
        "MB",
        1e6,
        lambda run: max(rank["device_peak"] - rank["shard"] for rank in run),
    ),
    "bytes": Measure(
        "bytes read or mapped, all ranks",
        "GB",
        1e9,
        lambda run: sum(map(_bytes, run)),
    ),
    "storage": Measure("bytes from storage, all ranks", "GB", 1e9, lambda run: sum(rank["read_bytes"] for rank in run)),
    "sent": Measure("weights over HTTP, all ranks", "GB", 1e9, lambda run: run[0]["sent"]),
}
"""Lower is better for all. "device" needs a GPU, "storage" a cold page cache, "sent" a Hub on this machine."""


def summarise(runs: dict[str, list[Run]], measures: Sequence[str]) -> dict[str, Any]:
    """For each measure: the values of both sides with their spread, and the ratios of first to second side by pair.

    A ratio above 1 means that the second side takes less; it is None if the second side takes nothing.
    """
    result: dict[str, Any] = {}
    for name in measures:
        values = {side: [MEASURES[name].of(run) for run in of_side] for side, of_side in runs.items()}
        first, second = values.values()
        result[name] = {side: spread(numbers) for side, numbers in values.items()}
        result[name]["ratio"] = spread_of_ratios(first, second) if min(second) > 0 else None
    return result


def save(path: Path, result: Mapping[str, Any], text: str) -> None:
    """Write the numbers (.json) and the table (.md) of a result to `path`, a file name without suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def spread(values: Sequence[Any]) -> dict[str, Any]:
    """Median, extremes, and the values."""
    middle = statistics.median(values)
    return {"median": middle, "min": min(values), "max": max(values), "values": list(values)}


def spread_of_ratios(numbers: Sequence[float], divisors: Sequence[float]) -> dict[str, Any]:
    """The `spread` of the ratios of each round."""
    return spread([number / divisor for number, divisor in zip(numbers, divisors, strict=True)])


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """For each side, the seconds of the slowest rank in every round; `ranks` has the seconds of each rank."""
    return {side: [max(at) for at in zip(*(rank[side] for rank in ranks), strict=True)] for side in ranks[0]}


def compared(ranks: Sequence[Mapping[str, Sequence[float]]], base: str) -> dict[str, Any]:
    """The `spread` of the `slowest` seconds of each side, and of the ratios of the others to those of `base`."""
    seconds = slowest(ranks)
    return {
        "seconds": {side: spread(values) for side, values in seconds.items()},
        "ratios": {side: spread_of_ratios(at, seconds[base]) for side, at in seconds.items() if side != base},
    }


def shown_spread(found: dict[str, Any]) -> str:
    """A `spread` of ratios as a table cell."""
    return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"


def listed(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an option: names of `known`, with commas between."""

    def names(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(known):
            raise ArgumentTypeError(f"got {', '.join(sorted(unknown))}, expected some of {', '.join(known)}")
        return text.split(",")

    return names


def numbers(text: str) -> list[int]:
    """The type of an option: numbers of 1 or more, with commas between."""
    if not all(each.isdecimal() and int(each) for each in text.split(",")):
        raise ArgumentTypeError(f"got {text!r}, expected numbers of 1 or more")
    return [int(each) for each in text.split(",")]


def at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """The type of an option: a number that is not less than `least`."""

    def number(text: str) -> float:
        if (value := kind(text)) < least:
            raise ArgumentTypeError(f"got {text}, expected {least} or more")
        return value

    return number


def head(*columns: str) -> list[str]:
    """The first two lines of a Markdown table."""
    return [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]


def page(result: dict[str, Any], columns: Sequence[str], rows: Iterable[str], *remarks: str) -> str:
    """A Markdown table, and below it the remarks, the first with the date, the machine and the command."""
    about = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    parts = [about["cpu"], f"{about['cores']} cores", f"{about['memory'] / 2**30:.0f} GiB", about.get("gpu")]
    parts += [about["system"], f"huge pages: {about['huge_pages'] or 'none'}"]
    machine = f"{', '.join(filter(None, parts))}; {versions}"
    lines = [f"{remarks[0]}; {about['date']}", *remarks[1:], machine, f"`{result['command']}`"]
    return "\n".join([*head(*columns), *rows, "", *(f"- {line}" for line in lines)]) + "\n"


def _bytes(rank: dict[str, Any]) -> int:
    """Bytes copied by read calls, or pages of mapped files, libraries included; or our loader's count, if larger."""
    return max(rank["rchar"] + rank["file_peak"] - rank["file_start"], rank.get("report", {}).get("bytes_read", 0))
