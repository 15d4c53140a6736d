"""One chart per run: medians of each measure as bars from zero, single loads as points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import MEASURES, remarks

COLOURS = ("#c3cad2", "#8ab8f2")


def draw(result: dict[str, Any], path: Path) -> bool:
    """Draw the chart to `path`, a PNG; returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = list(next(iter(result["models"].values()))["measures"])
    figure = Figure(figsize=(3.4 * len(names), 4.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        _bars(axes, result, name)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    setting, machine, _ = remarks(result)[:3]
    legend = (
        "bars: medians; points: every run; less is better. Ratio: the first by the second, median (min to max) of pairs"
    )
    figure.supxlabel(f"{setting}\n{machine}\n{legend}", fontsize=8)
    figure.savefig(path, dpi=150)
    return True


def _bars(axes: Any, result: dict[str, Any], name: str) -> None:
    """One measure: a pair of bars per checkpoint."""
    measure, width = MEASURES[name], 0.38
    for index, (side, label) in enumerate(result["sides"].items()):
        for place, found in enumerate(result["models"].values()):
            numbers, at = found["measures"][name][side], place + (index - 0.5) * (width + 0.04)
            values = [value / measure.scale for value in numbers["values"]]
            height = numbers["median"] / measure.scale
            axes.bar(at, height, width, color=COLOURS[index], label=label if place == 0 else None)
            step = width / 2 / max(len(values) - 1, 1)
            points = [at + (number - (len(values) - 1) / 2) * step for number in range(len(values))]
            axes.scatter(points, values, s=10, color="black", alpha=0.6, linewidths=0, zorder=3)
            axes.annotate(f"{height:.3g}", (at, 0), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(
        range(len(result["models"])),
        [_caption(model, found, name) for model, found in result["models"].items()],
        fontsize=8,
    )
    axes.set_title(measure.title.replace(", ", "\n"), fontsize=9)
    axes.set_ylabel(measure.unit)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def _caption(model: str, found: dict[str, Any], name: str) -> str:
    """The label below a pair of bars."""
    ratio = found["measures"][name]["ratio"]
    words = f"ratio {ratio['median']:.3g}\n({ratio['min']:.3g} to {ratio['max']:.3g})" if ratio is not None else ""
    return f"{model}, {found['checkpoint']['bytes'] / 1e9:.2f} GB\n{words}"
