"""A drawing of how one layer, the embedding and the head are cut: every weight to scale, every rank in its colour.

Weights are drawn as x A multiplies by them: as high as there are input features, as wide as there are output features.
So what is cut column by column looks it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from .errors import UsageError, describe
from .layout import Range
from .outline import Outline, Parameter
from .tree import size

COLOURS = ("#3f74b8", "#ee9b45", "#56a578", "#c65b52", "#8a72b5", "#d8b840", "#58adc1", "#a37c63")
"""One a rank; more ranks share a colour map."""
WHOLE, INK, FAINT, GROUND = "#c9ced6", "#23272e", "#666e79", "#f4f5f7"

LONGEST = 2.7
"""Sides are drawn to scale up to this many times the layer's median side, and broken where they are longer."""
THINNEST = 0.1
"""The least side of a weight, in the same unit."""
GAP, CAPTION, TITLE, MARGIN, GUTTER = 0.3, 0.66, 0.42, 0.18, 0.16
"""Space between weights, below them for captions, above them for the title, around them, and between blocks."""
INCHES = 1.05
"""Inches of the unit."""


@dataclass
class Weight:
    """A weight in the drawing; sides in units."""

    label: str
    parameter: Parameter
    features: tuple[int, int]
    """Input and output features: height and width; a vector has no input."""
    cut: str | None
    """"columns", "rows", or None where every rank holds all of it."""
    told: str
    """How it is cut and what is communicated, in words."""
    copies: int = 1
    """Experts."""
    bias: Parameter | None = None
    height: float = 0.0
    width: float = 0.0

    def resize(self, unit: float) -> None:
        """Set the sides, `unit` features being one."""
        self.height, self.width = (min(max(length / unit, THINNEST), LONGEST) for length in self.features)

    @property
    def pitch(self) -> float:
        """Space that it takes in a row, its caption too."""
        return max(self.width, 0.084 * len(self.label), 0.066 * len(self.told)) + GAP

    @property
    def sizes(self) -> str:
        """Its features in words."""
        copies = f"{self.copies} experts, " if self.copies > 1 else ""
        return copies + " \u2192 ".join(str(length) for length in self.features if length)


@dataclass
class Block:
    """Weights that stand beside each other, with a title."""

    title: str
    weights: list[Weight]
    is_stacked: bool = False
    """Whether they stand below each other."""
    x: float = 0.0
    top: float = 0.0
    right: float = 0.0

    def place(self, x: float, top: float) -> None:
        """Set the upper left corner, and the right side as close as it gets."""
        self.x, self.top, self.right = x, top, x + self.width

    @property
    def inner(self) -> float:
        """Height of the highest weight."""
        return max(weight.height + (0.13 if weight.bias is not None else 0) for weight in self.weights)

    @property
    def height(self) -> float:
        """Height of all of it, captions too."""
        if self.is_stacked:
            return TITLE + sum(weight.height + CAPTION for weight in self.weights)
        return TITLE + self.inner + CAPTION

    @property
    def width(self) -> float:
        """Width of all of it."""
        pitches = [weight.pitch for weight in self.weights]
        return (max(pitches) if self.is_stacked else sum(pitches)) - GAP + 2 * MARGIN


def draw(outline: Outline, path: str) -> None:
    """Draw the picture to `path`, whose ending says the format. Raises UsageError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fix = "pip install 'tp-transformers[picture]', or pip install matplotlib."
        raise UsageError(describe("--png", got="no matplotlib", expected="it to draw with", fix=fix)) from None
    layer, rows, vectors = _layer(outline)
    embedding, head = (_end(outline, module) for module in ("embedding", "head"))
    blocks = [block for block in (embedding, vectors, *rows, head) if block is not None]
    unit = median(length for row in rows for weight in row.weights for length in weight.features)
    for weight in (weight for block in blocks for weight in block.weights):
        weight.resize(unit)
    # To the left stand the embedding and the vectors, then come the rows, and beside the first of them the head.
    x, top = 0.0, 0.0
    left = [block for block in (embedding, vectors) if block is not None]
    for block in left:
        block.place(0, top)
        top -= block.height + GUTTER
    for block in left:
        block.right = x = max(other.width for other in left)
    top = 0.0
    for row in rows:
        row.place(x + GUTTER if left else 0, top)
        top -= row.height + GUTTER
    beside = [row for row in rows if head is not None and row.top > -head.height - GUTTER]
    if head is not None:
        head.place(max(row.right for row in beside) + GUTTER, 0)
    width = max(block.right for block in blocks)
    for block in blocks:
        if block not in left and block not in beside:
            block.right = width
    height = max(block.height - block.top for block in blocks)
    figure = Figure(figsize=((width + 0.4) * INCHES, (height + 1.45) * INCHES), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.2, width + 0.2), ylim=(-height - 0.2, 1.25), aspect="equal")
    axes.axis("off")
    brush = _Brush(axes, outline.size)
    _head(brush, outline, layer)
    for block in blocks:
        brush.panel(block)
    figure.savefig(path, dpi=200)


def _head(brush: _Brush, outline: Outline, layer: str) -> None:
    """The title, and what the colours mean."""
    model = os.path.basename(os.path.normpath(outline.survey.name))
    brush.write(0, 1.02, f"{model} on {outline.size} rank{'s' * (outline.size > 1)}: {layer}", size=15, weight="bold")
    scale = "height: input features; width: output features; to scale (zigzag: longer than drawn); white lines: heads"
    brush.write(0, 0.74, scale, size=9, color=FAINT)
    ranks = range(outline.size) if outline.size <= len(COLOURS) else (0, outline.size // 2, outline.size - 1)
    legend = [(brush.colours[rank], f"rank {rank}: {size(outline.parameter_bytes[rank])}") for rank in ranks]
    x = 0.0
    for colour, text in [*legend, (WHOLE, "every rank, whole")]:
        brush.rectangle(x, 0.3, 0.2, 0.2, colour)
        brush.write(x + 0.28, 0.4, text, size=9.5)
        x += 0.6 + 0.072 * len(text)


class _Brush:
    """Draws weights on axes."""

    def __init__(self, axes: Any, ranks: int) -> None:
        from matplotlib import colormaps

        self.axes = axes
        self.colours: Sequence[Any] = COLOURS
        if ranks > len(COLOURS):
            self.colours = [colormaps["turbo"](0.06 + 0.88 * rank / (ranks - 1)) for rank in range(ranks)]

    def write(self, x: float, y: float, text: str, **style: Any) -> None:
        """A text, by default from `x` on and around `y`."""
        self.axes.text(x, y, text, **{"color": INK, "va": "center", "ha": "left", **style})

    def rectangle(self, x: float, y: float, width: float, height: float, colour: Any, **style: Any) -> None:
        """A rectangle whose lower left corner is at (x, y)."""
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, **{"edgecolor": "none", **style}))

    def panel(self, block: Block) -> None:
        """A block: its ground, its title and its weights, those that are less high than others in the middle."""
        self.rectangle(block.x, block.top - block.height, block.right - block.x, block.height, GROUND)
        x, top = block.x + MARGIN, block.top - TITLE
        self.write(x, block.top - 0.2, block.title, size=10.5, weight="bold")
        for weight in block.weights:
            if block.is_stacked:
                self.paint(weight, x, top)
                top -= weight.height + CAPTION
            else:
                self.paint(weight, x, top - (block.inner - weight.height) / 2)
                x += weight.pitch

    def paint(self, weight: Weight, x: float, top: float) -> None:
        """A weight whose upper left corner is at (x, top), its bias, and what it is."""
        for card in range(min(weight.copies - 1, 2), 0, -1):  # experts are alike
            self.rectangle(
                x + 0.07 * card,
                top - weight.height + 0.07 * card,
                weight.width,
                weight.height,
                "#eef0f3",
                edgecolor="#aeb5bf",
                linewidth=0.6,
            )
        self._pieces(weight, weight.parameter, x, top, weight.width, weight.height)
        below = top - weight.height
        if weight.bias is not None:
            below -= 0.13
            self._pieces(weight, weight.bias, x, below + 0.09, weight.width, 0.09)
        for vertical, length, features in zip(
            (True, False), (weight.height, weight.width), weight.features, strict=True
        ):
            if length == LONGEST and features > 0:
                self._break(x, top, weight.width, weight.height, vertical=vertical)
        for line, (text, style) in enumerate(
            (
                (weight.label, {"size": 8.5, "weight": "bold"}),
                (weight.sizes, {"color": FAINT}),
                (weight.told, {"color": FAINT}),
            )
        ):
            self.write(x, below - 0.14 - 0.15 * line, text, **{"size": 7.5, **style})

    def _pieces(self, weight: Weight, parameter: Parameter, x: float, top: float, width: float, height: float) -> None:
        """What each rank holds, in its colour; a part that several hold is striped with theirs."""
        if parameter.layout is None or parameter.whole_because is not None:
            self.rectangle(x, top - height, width, height, WHOLE)
            return
        split, columns = parameter.layout.split, weight.cut == "columns" or len(parameter.shape) == 1
        holders: dict[Range, list[int]] = {}
        for rank, ranges in enumerate(split.ranges):
            for held in ranges:
                holders.setdefault(held, []).append(rank)
        for (start, stop), ranks in holders.items():
            first, last = start / split.length, stop / split.length
            piece = (
                (x + first * width, top - height, (last - first) * width, height)
                if columns
                else (x, top - last * height, width, (last - first) * height)
            )
            self._stripes(piece, ranks, across=columns)
            text = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
            if piece[2] > 0.02 + 0.09 * len(text) and piece[3] > 0.11:
                shade = {"boxstyle": "round,pad=0.2", "facecolor": "#0000003c", "edgecolor": "none"}
                style = {"size": 9.5, "weight": "bold", "color": "white", "ha": "center"}
                spot = (piece[0] + piece[2] / 2, piece[1] + piece[3] / 2)
                self.write(*spot, text, **style, bbox=shade if len(ranks) > 1 else None)
        side, box = width if columns else height, (x, top, width, height)
        heads = parameter.heads or 1
        for head in range(1, heads):
            self._line(box, head / heads, columns, min(0.45, 8 * side / heads))
        narrowest = min((stop - start for start, stop in holders if stop > start), default=0) / split.length
        for end in {end for held in holders for end in held} - {0, split.length}:
            self._line(box, end / split.length, columns, min(1.6, 14 * side * narrowest))

    def _stripes(self, piece: tuple[float, float, float, float], ranks: Sequence[int], *, across: bool) -> None:
        x, y, width, height = piece
        count = 1 if len(ranks) == 1 else len(ranks) * max(1, 8 // len(ranks))
        for stripe in range(count):
            colour = self.colours[ranks[stripe % len(ranks)]]
            if across:
                self.rectangle(x, y + height * (count - 1 - stripe) / count, width, height / count, colour)
            else:
                self.rectangle(x + width * stripe / count, y, width / count, height, colour)

    def _line(self, box: tuple[float, float, float, float], at: float, upright: bool, points: float) -> None:
        """A white line through a box, given as (x, top, width, height), at a part of its side."""
        x, top, width, height = box
        ends = ([x + at * width] * 2, [top - height, top]) if upright else ([x, x + width], [top - at * height] * 2)
        self.axes.plot(*ends, color="white", linewidth=points, solid_capstyle="butt")

    def _break(self, x: float, top: float, width: float, height: float, *, vertical: bool) -> None:
        """A zigzag through a weight whose side is longer than it is drawn."""
        steps = 12
        across, along = (width, height) if vertical else (height, width)
        for shift in (0.0, 0.07):
            line = [along * 0.36 + shift + 0.035 * (-1) ** step for step in range(steps + 1)]
            spread = [-0.04 + (across + 0.08) * step / steps for step in range(steps + 1)]
            if vertical:
                self.axes.plot([x + s for s in spread], [top - a for a in line], color=GROUND, linewidth=2)
            else:
                self.axes.plot([x + a for a in line], [top - s for s in spread], color=GROUND, linewidth=2)


def _layer(outline: Outline) -> tuple[str, list[Block], Block | None]:
    """A layer of the most common kind in the stack with most bytes: its name, its blocks, its vectors but for biases."""
    layers: dict[str, list[Parameter]] = {}
    for parameter in outline.parameters:
        steps = parameter.name.split(".")
        number = next((place for place, step in enumerate(steps) if step.isdigit()), None)
        if number is not None:
            layers.setdefault(".".join(steps[: number + 1]), []).append(parameter)
    stacks: Counter[str] = Counter()
    for name, held in layers.items():
        stacks[name.rpartition(".")[0]] += sum(parameter.nbytes for parameter in held)
    stack = stacks.most_common(1)[0][0]
    kinds: dict[object, list[str]] = {}
    for name, held in layers.items():
        if name.rpartition(".")[0] == stack:
            kind = tuple((one.name.removeprefix(name), one.shape, one.strategy) for one in held)
            kinds.setdefault(kind, []).append(name)
    layer = max(kinds.values(), key=len)[0]
    named = {parameter.name: parameter for parameter in layers[layer]}
    rows: dict[str, list[Weight]] = {}
    vectors = []
    for name, parameter in named.items():
        owner, _, kind = name.rpartition(".")
        own, matrix = owner.removeprefix(f"{layer}."), named.get(f"{name.removesuffix('bias')}weight")
        if kind.endswith("_bias"):  # of experts, whose matrices are parameters of one module
            matrix = named.get(name.removesuffix("_bias"))
        if len(parameter.shape) > 1 and matrix in (None, parameter):
            weight = _weight(outline, parameter, own.rpartition(".")[2] if kind == "weight" else kind)
            weight.bias = named.get(f"{owner}.bias" if kind == "weight" else f"{name}_bias")
            child, *rest = own.split(".")
            block = f"{child}.{rest[0]}" if rest and rest[0].isdigit() else child
            rows.setdefault(block, []).append(weight)
        elif matrix is None or len(matrix.shape) == 1:
            label = own if kind == "weight" else f"{own}.{kind}"
            vectors.append(Weight(label, parameter, (0, parameter.shape[0]), "columns", _told(parameter)))
    blocks = [Block(_title(outline, layer, child), weights) for child, weights in rows.items()]
    return layer, blocks, Block("vectors", vectors, is_stacked=True) if vectors else None


def _title(outline: Outline, layer: str, child: str) -> str:
    """The name of a block of a layer, and the heads in it."""
    heads = next((one for one in outline.heads if f"{one.name}.".startswith(f"{layer}.{child}.")), None)
    return child if heads is None else f"{child}: {heads.whole[0]} query and {heads.whole[1]} KV heads"


def _end(outline: Outline, which: str) -> Block | None:
    """The embedding, or the head, if the model has one."""
    model = outline.survey.model
    module = model.get_input_embeddings() if which == "embedding" else model.get_output_embeddings()
    owners = [name for name, part in model.named_modules(remove_duplicate=False) if part is module and part is not None]
    for parameter in outline.parameters:
        for name in (parameter.name, *parameter.tied):
            owner = name.rpartition(".")[0]
            if owner in owners and len(parameter.shape) == 2:
                weight = _weight(outline, parameter, owner.rpartition(".")[2], owner)
                if name != parameter.name:
                    weight.told = f"tied to {parameter.name.removesuffix('.weight').rpartition('.')[2]}"
                return Block(which, [weight])
    return None


def _weight(outline: Outline, parameter: Parameter, label: str, owner: str | None = None) -> Weight:
    """A weight the way up in which inputs meet it."""
    module = outline.survey.model.get_submodule(owner or parameter.name.rpartition(".")[0])
    *experts, first, second = parameter.shape
    is_upright = isinstance(module, nn.Embedding | Conv1D) or bool(getattr(module, "is_transposed", False))
    cut = None
    if parameter.layout is not None:
        cut = "rows" if parameter.layout.dim - len(parameter.shape) == (-2 if is_upright else -1) else "columns"
    features = (first, second) if is_upright else (second, first)
    return Weight(label, parameter, features, cut, _told(parameter), experts[0] if experts else 1)


def _told(parameter: Parameter) -> str:
    """The strategy, and what is communicated after it."""
    name = parameter.strategy or "no rule"
    if parameter.whole_because is not None or len(parameter.shape) == 3:  # of experts, others sum the outputs
        return name
    gathers = name.endswith(("_rep", "_gather_output")) and "rowwise" not in name
    return name + (" \u2192 all-gather" if gathers else " \u2192 all-reduce" if "rowwise" in name else "")
