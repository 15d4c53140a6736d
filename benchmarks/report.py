"""The report of measurements: measures of each run, ratios of pairs with their spread, a Markdown table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
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
        ratios = [a / b if b > 0 else None for a, b in zip(first, second, strict=True)]
        result[name] = {side: spread(numbers) for side, numbers in values.items()}
        result[name]["ratio"] = spread(ratios) if None not in ratios else None
    return result


def save(path: Path, result: Mapping[str, Any], text: str) -> None:
    """Write the numbers (.json) and the table (.md) of a result to `path`, a file name without suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def spread(values: Sequence[Any]) -> dict[str, Any]:
    """Median, quartiles, extremes, and the values."""
    low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "min": min(values), "q1": low, "q3": high, "max": max(values), "values": list(values)}


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """For each side, the seconds of the slowest rank in every round; `ranks` has the seconds of each rank."""
    return {side: [max(at) for at in zip(*(rank[side] for rank in ranks), strict=True)] for side in ranks[0]}


def shown_spread(found: dict[str, Any]) -> str:
    """A `spread` of ratios as a table cell."""
    return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"


def shown_machine(about: dict[str, Any]) -> str:
    """A line with the processor, the system and the versions of libraries."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return f"{about['cpu']}, {about['cores']} cores, {about['system']}; {versions}"


def shards(run: Run) -> dict[str, int]:
    """Bytes of all ranks' shards, by location."""
    anonymous = sum(rank["anonymous_shard"] for rank in run)
    rest = sum(rank["shard"] for rank in run) - anonymous
    device = "device_peak" in run[0]
    return {
        "in anonymous memory": anonymous,
        "in pages of mapped files": 0 if device else rest,
        "on the device": rest if device else 0,
    }


def fractions(runs: Sequence[Run], limits: dict[str, float]) -> dict[str, float]:
    """The fraction of each limit that a side's median load reaches: bytes of all shards per second, over the limit."""
    shard = sum(rank["shard"] for rank in runs[0])
    seconds = statistics.median(MEASURES["load"].of(run) for run in runs)
    return {name: shard / seconds / limit for name, limit in limits.items()}


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all models and measures; the machine and versions are below it."""
    first, second = result["sides"].values()
    lines = [
        f"| checkpoint | measure | {first} | {second} | ratio: median (min to max) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for model, found in result["models"].items():
        checkpoint = f"{model}, {found['checkpoint']['bytes'] / 1e9:.2f} GB"
        for name, numbers in found["measures"].items():
            measure = MEASURES[name]
            sides = " | ".join(
                f"{numbers[side]['median'] / measure.scale:.3g} {measure.unit}" for side in result["sides"]
            )
            lines.append(f"| {checkpoint} | {measure.title} | {sides} | {_ratio(numbers['ratio'])} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in remarks(result))]) + "\n"


def remarks(result: dict[str, Any]) -> list[str]:
    """Notes below the table."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines = [
        f"{result['setting']}, {result['pairs']} pairs of fresh processes, in turn; {machine['date']}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory'] / 2**30:.0f} GiB"
        + (f", {machine['gpu']}" if machine["gpu"] else "")
        + f", {machine['system']}, huge pages: {machine['huge_pages'] or 'none'}; {versions}",
        f"`{result['command']}`",
    ]
    return lines


def _bytes(rank: dict[str, Any]) -> int:
    """Bytes copied by read calls, or pages of mapped files, libraries included; or our loader's count, if larger."""
    return max(rank["rchar"] + rank["file_peak"] - rank["file_start"], rank.get("report", {}).get("bytes_read", 0))


def _ratio(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio['median']:.3g} ({ratio['min']:.3g} to {ratio['max']:.3g})"
