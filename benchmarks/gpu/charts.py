"""Charts of a run: tokens a second by number of ranks, and seconds of loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = {"ours": "#2f6fb7", "transformers": "#8a929b", "plain": "#8a929b", "native": "#8a929b"}
STYLES = {"eager": ":", "graph": "-", "compiled": "--"}


def draw(steps: Mapping[str, Any], folder: Path) -> bool:
    """Write `decode.png` and `load.png`; returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    decoded = [line for line in steps.get("decode", {}).get("lines", ()) if "tokens_per_second" in line]
    loaded = [line for line in steps.get("load", {}).get("lines", ()) if "shard" in line]
    if decoded:
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for side, mode in dict.fromkeys((line["side"], line["mode"]) for line in decoded):
            points = sorted(
                (line["ranks"], line["tokens_per_second"])
                for line in decoded
                if (line["side"], line["mode"], line["batch"]) == (side, mode, 1)
            )
            style = {"color": COLOURS[side], "ls": STYLES[mode], "marker": "o"}
            axes.plot([x for x, _ in points], [y for _, y in points], label=f"{side}, {mode}", **style)
        axes.set(xlabel="ranks, of which rank 0 computes", ylabel="tokens a second, batch 1", ylim=(0, None))
        axes.legend(frameon=False, fontsize=8)
        _save(figure, folder / "decode.png")
    if loaded:
        figure = Figure(figsize=(7, 0.4 * len(loaded) + 1), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(
            [line["what"] for line in loaded],
            [line["load"] for line in loaded],
            color=[COLOURS[line["side"]] for line in loaded],
        )
        axes.bar_label(bars, fmt="%.2f s", fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        _save(figure, folder / "load.png")
    return True


def _save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
