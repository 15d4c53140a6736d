"""Drawing of the shards of one layer, the embedding and the head: weights to scale, one colour per rank.

Weights are drawn as `A` in `x A`: the height is the input features, the width the output features. A column-parallel
weight shows columns of colour. Biases are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any

from ...anatomy.layers import layer_around
from ...anatomy.linears import has_inputs_first
from ...errors import UsageError, describe
from ...loading.footprint.memory import MemoryPlan, Parameter
from ...slices.layout import Range
from ...text import size

COLOURS = ("#3f74b8", "#ee9b45", "#56a578", "#c65b52", "#8a72b5", "#d8b840", "#58adc1", "#a37c63")
"""Colours of ranks; for more ranks, a colour map is used."""
HATCHES = ("////", "\\\\\\\\", "||||", "....")
"""Hatches of further ranks that hold the same shard as the first."""
REPLICATED, FAINT = "#c9ced6", "#666e79"
ARROW = " \u2192 "
LONGEST, THINNEST = 2.7, 0.1
"""Longest and shortest drawn side; the unit is the layer's median side, 1.05 inches."""
TITLE, CAPTION, GAP = 0.42, 0.75, 0.3
"""Space above weights, below them, and between them."""


@dataclass(frozen=True)
class Weight:
    label: str
    parameter: Parameter
    features: tuple[int, int]
    """Input features (height) and output features (width); a vector has no input features."""
    by_column: bool = True
    """True if the shards are columns of the drawing, False if they are rows."""
    tied_to: str = ""

    @property
    def caption(self) -> str:
        """The features, and on the next line the strategy with its communication."""
        shape, name = self.parameter.shape, self.parameter.strategy or "no rule"
        experts = f"{shape[0]} experts, " if len(shape) == 3 else ""
        # Outputs of experts are summed by another module.
        sums = "rowwise" in name and self.parameter.replicated_because is None and not experts
        gathers = name.endswith(("_rep", "_gather_output")) and not sums
        after = f"{ARROW}all-reduce" if sums else f"{ARROW}all-gather" * gathers
        how = f"tied to {self.tied_to}" if self.tied_to else name + after
        return f"{experts}{ARROW.join(str(length) for length in self.features if length)}\n{how}"


def draw(planned: MemoryPlan, path: str, memory: Sequence[int] = ()) -> None:
    """Draw the picture to `path`; the file extension decides the format. `memory`: bytes of each rank, if known.

    Raises UsageError without matplotlib, and if the file cannot be written.
    """
    picture = compose(planned, memory)
    try:
        picture.savefig(path, dpi=200)
    except (OSError, ValueError) as error:
        fix = "Name a file that can be written, ending in .png, .svg or .pdf."
        raise UsageError(describe(f"--png {path}", got=str(error), expected="a picture's name", fix=fix)) from error


def compose(planned: MemoryPlan, memory: Sequence[int] = ()) -> Any:
    """Make the picture, a matplotlib Figure. Raises UsageError without matplotlib, or for a model without layers."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        fix = "pip install 'tp-transformers[picture]', or pip install matplotlib."
        raise UsageError(describe("--png", got="no matplotlib", expected="it to draw with", fix=fix)) from None
    colours: list[Any] = list(COLOURS)
    if planned.size > len(COLOURS):
        colours = [colormaps["turbo"](0.06 + 0.88 * rank / (planned.size - 1)) for rank in range(planned.size)]
    layer, blocks, vectors = largest_layer(planned)
    unit = median(length for weights in blocks.values() for weight in weights for length in weight.features)
    figure = Figure(facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    top = right = 0.0
    ends = {name: list(at_end(planned, name)) for name in ("embedding", "head")}
    for row in ({**ends, "vectors": vectors}, *({title: weights} for title, weights in blocks.items())):
        x = highest = 0.0
        for title, weights in row.items():
            if weights:
                axes.text(x, top - 0.2, title, size=10.5, weight="bold", va="center")
            for weight in weights:
                height, width = (min(max(side / unit, THINNEST), LONGEST) for side in weight.features)
                below, caption = top - TITLE - height, weight.caption
                _draw_shards(axes, weight, colours, (x, below, width, height))
                axes.text(x, below - 0.08, weight.label, size=8.5, weight="bold", va="top")
                axes.text(x, below - 0.25, caption, size=7.5, color=FAINT, va="top")
                x += max(width, 0.084 * len(weight.label), *(0.066 * len(line) for line in caption.splitlines())) + GAP
                highest = max(highest, height)
        right, top = max(right, x), top - (TITLE + highest + CAPTION) * (x > 0)
    ranks = range(planned.size) if planned.size <= len(COLOURS) else (0, planned.size // 2, planned.size - 1)
    held = planned.total_bytes if memory else planned.parameter_bytes
    rooms = [f" of {size(nbytes)}" for nbytes in memory] or [""] * planned.size
    entries = [Patch(color=colours[rank], label=f"rank {rank}: {size(held[rank])}{rooms[rank]}") for rank in ranks]
    right = max(right, (2.4 if memory else 1.7) * (len(entries) + 1), 6.0)
    name = os.path.basename(os.path.normpath(planned.survey.name))
    axes.text(0, 1.02, f"{name} on {planned.size} rank{'s' * (planned.size > 1)}: {layer}", size=15, weight="bold")
    scale = (
        f"height: input features; width: output features; to scale up to {LONGEST * unit:.0f}; thin lines: heads; "
        "hatched: held by several ranks"
    )
    axes.text(0, 0.74, scale, size=9, color=FAINT)
    handles = [*entries, Patch(color=REPLICATED, label="replicated")]
    where = {"loc": "center left", "bbox_to_anchor": (-0.1, 0.4), "bbox_transform": axes.transData}
    axes.legend(handles=handles, ncols=len(handles), frameon=False, fontsize=9.5, **where)
    axes.set(xlim=(-0.2, right), ylim=(top, 1.45), aspect="equal")
    axes.axis("off")
    figure.set_size_inches(1.05 * (right + 0.2), 1.05 * (1.45 - top))
    return figure


def largest_layer(planned: MemoryPlan) -> tuple[str, dict[str, list[Weight]], list[Weight]]:
    """The first of the largest layers: its name, its matrices by block, and its vectors."""
    layers: dict[str, list[Parameter]] = {}
    for parameter in planned.parameters:
        layers.setdefault(layer_around(planned.survey.model, parameter.name) or "", []).append(parameter)
    layers.pop("", None)
    if not layers:
        fix = "Leave out --png: there is no picture of such a model."
        raise UsageError(describe("--png", got="a model without layers", expected="a stack of layers", fix=fix))
    layer = max(layers, key=lambda name: sum(parameter.nbytes for parameter in layers[name]))
    blocks: dict[str, list[Weight]] = {}
    vectors = []
    for parameter in layers[layer]:
        owner, _, kind = parameter.name.removeprefix(f"{layer}.").rpartition(".")
        if len(parameter.shape) == 1 and not kind.endswith("bias"):
            vectors.append(Weight(owner if kind == "weight" else f"{owner}.{kind}", parameter, (0, parameter.shape[0])))
        elif len(parameter.shape) > 1 and not kind.endswith("bias"):
            child, *rest = owner.split(".")
            child = f"{child}.{rest[0]}" if rest and rest[0].isdigit() else child
            heads = next(
                (entry.unsharded for entry in planned.heads if f"{entry.name}.".startswith(f"{layer}.{child}.")),
                None,
            )
            title = child if heads is None else "{}: {} query and {} KV heads".format(child, *heads)
            label = owner.rpartition(".")[2] if kind == "weight" else kind
            blocks.setdefault(title, []).append(_matrix(planned, parameter, label, f"{layer}.{owner}"))
    return layer, blocks, vectors


def at_end(planned: MemoryPlan, which: str) -> Iterator[Weight]:
    """Yield the embedding or the head, if the model has one."""
    model = planned.survey.model
    module = model.get_input_embeddings() if which == "embedding" else model.get_output_embeddings()
    owners = [
        name for name, child in model.named_modules(remove_duplicate=False) if child is module and child is not None
    ]
    for parameter in planned.parameters:
        for owner in (name.rpartition(".")[0] for name in (parameter.name, *parameter.tied)):
            if owner in owners and len(parameter.shape) == 2:
                home = parameter.name.rpartition(".")[0]
                tied_to = home.rpartition(".")[2] if owner != home else ""
                yield _matrix(planned, parameter, owner.rpartition(".")[2], owner, tied_to)
                return


def _matrix(planned: MemoryPlan, parameter: Parameter, label: str, owner: str, tied_to: str = "") -> Weight:
    """A parameter with its input features as rows."""
    is_upright = has_inputs_first(planned.survey.model.get_submodule(owner))
    *_, first, second = parameter.shape
    by_column = True
    if parameter.layout is not None:
        by_column = parameter.layout.dim - len(parameter.shape) != (-2 if is_upright else -1)
    return Weight(label, parameter, (first, second) if is_upright else (second, first), by_column, tied_to)


def _draw_shards(axes: Any, weight: Weight, colours: list[Any], rectangle: tuple[float, float, float, float]) -> None:
    """Draw each rank's shard in its colour; shards on several ranks are hatched in the colours of the others."""
    x, y, width, height = rectangle
    parameter = weight.parameter
    if parameter.layout is None or parameter.replicated_because is not None:
        axes.bar(x, height, width, y, align="edge", color=REPLICATED)
        return
    split = parameter.layout.split
    holders: dict[Range, list[int]] = {}
    for rank, ranges in enumerate(split.ranges):
        for start, stop in ranges:
            if stop > start:
                holders.setdefault((start, stop), []).append(rank)
    side, heads = width if weight.by_column else height, parameter.heads or 1
    edge = min(1.6, 14 * side * min(stop - start for start, stop in holders) / split.length)
    for (start, stop), ranks in holders.items():
        left, end = start / split.length, stop / split.length
        corner = (x + left * width, y) if weight.by_column else (x, y + (1 - end) * height)
        wide, high = ((end - left) * width, height) if weight.by_column else (width, (end - left) * height)
        where = {"x": corner[0], "height": high, "width": wide, "bottom": corner[1], "align": "edge"}
        axes.bar(**where, color=colours[ranks[0]], edgecolor="white", linewidth=edge)
        for rank, hatch in zip(ranks[1:], cycle(HATCHES), strict=False):  # all these ranks hold this shard
            axes.bar(**where, color="none", edgecolor=colours[rank], hatch=hatch, linewidth=0)
        label = ", ".join(map(str, ranks))
        if wide > 0.02 + 0.09 * len(label) and high > 0.11:
            middle = (corner[0] + wide / 2, corner[1] + high / 2)
            axes.text(*middle, label, size=9.5, weight="bold", color="white", ha="center", va="center")
    places = [head / heads for head in range(1, heads)]
    thin = {"color": "white", "linewidth": min(0.45, 8 * side / heads)}
    if weight.by_column:
        axes.vlines([x + place * width for place in places], y, y + height, **thin)
    else:
        axes.hlines([y + place * height for place in places], x, x + width, **thin)
