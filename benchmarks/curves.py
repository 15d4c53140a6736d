"""Compare training runs: losses at every step and final weights, as a table and as curves."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .meters import read_log

TOLERANCES = {"loss": 1e-3, "weights": 1e-4, "change": 1e-2}
"""Tolerances: of the loss of a step, relative; of a final weight, relative to the largest weight of its tensor; and,
since that would pass without training, relative to the largest change of the tensor by training."""

COLOURS = ("#111111", "#2f6fb7", "#d1495b", "#2a9d8f", "#edae49", "#8d6cab", "#6a994e", "#00798c", "#bc6c25", "#9a8c98")


def summary(log: list[dict[str, Any]]) -> dict[str, Any]:
    """Losses by step, medians of times and tokens per second, and peak memory."""
    steps = [line for line in log if "step" in line]
    parts = steps[-1]["seconds"]
    return {
        "losses": {str(line["step"]): line["loss"] for line in steps},
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steps),
        "seconds": {part: statistics.median(line["seconds"].get(part, 0.0) for line in steps) for part in parts},
        "memory": max(line["memory"] for line in steps),
    }


def compare(run: Path, reference: Path, initial: Path) -> dict[str, Any]:
    """Differences of a run from its reference: the folders of both, and of their initial model.

    Returns the relative differences of the loss by step, and the largest difference of the final weights over all
    tensors: "weights" relative to the tensor's largest weight, "change" to its largest change by training.
    """
    losses, expected = (
        {line["step"]: line["loss"] for line in read_log(folder / "log.jsonl") if "step" in line}
        for folder in (run, reference)
    )
    differences = {str(step): abs(loss - expected[step]) / abs(expected[step]) for step, loss in losses.items()}
    files = [_tensors(folder) for folder in (run / "final", reference / "final", initial)]
    if not files[0].keys() == files[1].keys() <= files[2].keys():
        raise OSError(f"{run / 'final'} holds other tensors than {reference / 'final'}")
    found = []
    for name in files[0]:
        own, whole, before = (_read(paths[name], name) for paths in files)
        scales = torch.stack([whole.abs().max(), (whole - before).abs().max()])
        found.append((own - whole).abs().max() / scales.clamp_min(1e-30))
    weights, change = torch.stack(found).amax(0).tolist()  # which is NaN where any is
    return {"differences": differences, "weights": weights, "change": change}


def faults(result: dict[str, Any]) -> list[str]:
    """The differences above their tolerance; NaN counts as above."""
    found = []
    for mode in result["modes"].values():
        numbers = [("loss", f"the loss of step {step}", each) for step, each in mode["differences"].items()]
        numbers += [("weights", "a final weight, by the largest,", mode["weights"])]
        numbers += [("change", "a final weight, by the largest change,", mode["change"])]
        for name, what, number in numbers:
            if not number <= TOLERANCES[name]:
                found.append(f"{mode['label']}: {what} differs by {number:.1e}, more than {TOLERANCES[name]:.0e}")
    return found


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    setting, about = result["setting"], result["machine"]
    lines = [
        f"`{result['command']}`",
        "",
        f"{setting['model']}, fp32, {setting['steps']} steps of {setting['batch']} x {setting['length']} tokens of "
        f"{setting['text']}, AdamW (betas 0.9 and 0.95, eps 1e-5, weight decay 0.1), gradients clipped to 1, learning "
        f"rate {setting['lr']} after {setting['warmup']} steps of warm-up. {machine_line(about)}",
        "",
        "| mode | losses | final weights | of their change | last loss | step | tokens/s | peak memory of a rank |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, mode in result["modes"].items():
        last = list(mode["losses"].values())[-1]
        is_reference = mode["against"] == name
        numbers = [max(mode["differences"].values()), mode["weights"], mode["change"]]
        shown = ["reference", "", ""] if is_reference else [f"{number:.1e}" for number in numbers]
        lines.append(
            f"| {mode['label']} | {' | '.join(shown)} | {last:.6f} | {mode['seconds']['step']:.2f} s "
            f"| {mode['tokens_per_second']:.0f} | {mode['memory'] / 1e9:.2f} GB |"
        )
    lines += [
        "",
        "Differences from one process, or, of a run that goes on with a checkpoint, from the run that wrote it; the "
        "largest of all steps, and of all tensors. Losses: relative. Final weights: the largest difference of a tensor "
        "by its largest weight; of their change: by the largest change that training made to it, of which the last bit "
        "of a weight of 5 is 2e-4. A loss of parts differs more than ranks do: it is nearer to fp64 than torch's own "
        "on a CPU. All ranks share the cores of one machine: their times are no measure of what ranks are for.",
        "",
        *_parts(result),
    ]
    return "\n".join(lines) + "\n"


def machine_line(about: dict[str, Any]) -> str:
    """The machine, the versions and the date as text."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return f"{about['cpu']}, {about['cores']} cores; {versions}; {about['date']}."


def _parts(result: dict[str, Any]) -> list[str]:
    """The medians of a step's phases, in milliseconds."""
    parts = ["data", "forward", "backward", "gradient sync", "clip", "optimizer"]
    lines = [f"| milliseconds of a step | {' | '.join(parts)} |", "| --- |" + " --- |" * len(parts)]
    for mode in result["modes"].values():
        shown = [f"{mode['seconds'][part] * 1e3:.0f}" if part in mode["seconds"] else "" for part in parts]
        lines.append(f"| {mode['label']} | {' | '.join(shown)} |")
    return lines


def draw(result: dict[str, Any], path: Path) -> bool:
    """Plot the losses, and below them their differences; returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 8), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    for number, (name, mode) in enumerate(result["modes"].items()):
        steps = [int(step) for step in mode["losses"]]
        is_reference = mode["against"] == name
        look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "label": mode["label"]}
        width = 5 if is_reference else 1.4
        look["linestyle"] = "-" if is_reference else (0, (4, 3 + number))  # so that those below show through
        top.plot(steps, list(mode["losses"].values()), linewidth=width, alpha=0.35 if is_reference else 1, **look)
        if not is_reference:
            shown = [max(difference, FLOOR) for difference in mode["differences"].values()]
            bottom.plot(steps, shown, linewidth=1, marker="o", markersize=3, **{**look, "linestyle": "-"})
    bottom.axhline(TOLERANCES["loss"], color="#888888", linestyle="--", linewidth=1)
    bottom.annotate(
        "allowed", (1, TOLERANCES["loss"]), xytext=(0, 3), textcoords="offset points", color="#888888", fontsize=8
    )
    bottom.set_yscale("log")
    bottom.set_ylim(FLOOR / 1.5, TOLERANCES["loss"] * 5)
    bottom.set_ylabel("relative difference of the loss")
    bottom.set_xlabel("step")
    top.set_ylabel("loss, nats a token")
    handles = [*top.get_legend_handles_labels()[0][:1], *bottom.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    setting = result["setting"]
    top.set_title(
        f"{setting['model']}, fp32, {setting['steps']} steps of {setting['batch']} x {setting['length']} tokens, "
        "the same batches in every mode",
        fontsize=10,
    )
    figure.supxlabel(f"{machine_line(result['machine'])} No difference at all is drawn at {FLOOR:.0e}.", fontsize=7)
    figure.savefig(path, dpi=150)
    return True


FLOOR = 1e-8
"""Plotted value for a difference of zero: below the resolution of fp32."""


def _tensors(folder: Path) -> dict[str, Path]:
    """{tensor: file} of a checkpoint."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name).double()
