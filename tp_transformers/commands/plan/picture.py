"""A drawing of how one layer, the embedding and the head are sharded: weights to scale, one colour a rank.

Weights are drawn as `x A` multiplies by them: height is the input features, width the output features. A weight that is
sharded by column shows columns of colour.
"""

from __future__ import annotations

import os
from statistics import median
from typing import Any

from ...errors import UsageError, describe
from ...slices.layout import Range
from ...text import size
from .layer import CAPTION, GUTTER, MARGIN, TITLE, Block, Weight, at_end, typical_layer
from .memory import MemoryPlan, Parameter

COLOURS = ("#3f74b8", "#ee9b45", "#56a578", "#c65b52", "#8a72b5", "#d8b840", "#58adc1", "#a37c63")
"""Colours of ranks; more ranks share a colour map."""
WHOLE, INK, FAINT, GROUND = "#c9ced6", "#23272e", "#666e79", "#f4f5f7"
INCHES = 1.05
"""Inches of the unit, which is the layer's median side."""
LONGEST = 2.7
"""Longest side, in units; longer sides are drawn with a break."""
THINNEST = 0.1
"""Shortest side, in units."""


def draw(planned: MemoryPlan, path: str) -> None:
    """Draw the picture to `path`, whose ending is the format.

    Raises UsageError without matplotlib, and if the file cannot be written.
    """
    picture = compose(planned)
    try:
        picture.savefig(path, dpi=200)
    except (OSError, ValueError) as error:
        fix = "Name a file that can be written, ending in .png, .svg or .pdf."
        raise UsageError(describe(f"--png {path}", got=str(error), expected="a picture's name", fix=fix)) from error


def compose(planned: MemoryPlan) -> Any:
    """The picture, a Figure of matplotlib. Raises UsageError without it, and for a model without layers."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fix = "pip install 'tp-transformers[picture]', or pip install matplotlib."
        raise UsageError(describe("--png", got="no matplotlib", expected="it to draw with", fix=fix)) from None
    layer, rows, vectors = typical_layer(planned)
    embedding, head = (at_end(planned, module) for module in ("embedding", "head"))
    left = [block for block in (embedding, vectors) if block is not None]
    blocks = [*left, *rows, *([head] if head is not None else [])]
    unit = median(length for row in rows for weight in row.weights for length in weight.features)
    for weight in (weight for block in blocks for weight in block.weights):
        weight.height, weight.width = (min(max(side / unit, THINNEST), LONGEST) for side in weight.features)
    # The embedding and the vectors are on the left, then the rows; the head is to the right of the first rows.
    x = 0.0
    for column in (left, rows):
        top = 0.0
        for block in column:
            block.place(x, top)
            top -= block.height + GUTTER
        x = max((block.right for block in left), default=-GUTTER) + GUTTER
    for block in left:
        block.right = x - GUTTER
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
    brush = _Brush(axes, planned.size)
    brush.legend(planned, layer)
    for block in blocks:
        brush.block(block)
    return figure


class _Brush:
    """Draws on axes; y is up, and the lower left corner of a rectangle is (x, y)."""

    def __init__(self, axes: Any, ranks: int) -> None:
        from matplotlib import colormaps

        self.axes = axes
        self.colours: list[Any] = list(COLOURS)
        if ranks > len(COLOURS):
            self.colours = [colormaps["turbo"](0.06 + 0.88 * rank / (ranks - 1)) for rank in range(ranks)]

    def write(self, x: float, y: float, text: str, **style: Any) -> None:
        self.axes.text(x, y, text, **{"color": INK, "va": "center", "ha": "left", **style})

    def rectangle(self, x: float, y: float, width: float, height: float, colour: Any, **style: Any) -> None:
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, **{"edgecolor": "none", **style}))

    def legend(self, planned: MemoryPlan, layer: str) -> None:
        """The title and the colours."""
        model = os.path.basename(os.path.normpath(planned.survey.name))
        self.write(
            0, 1.02, f"{model} on {planned.size} rank{'s' * (planned.size > 1)}: {layer}", size=15, weight="bold"
        )
        scale = "height: input features; width: output features; to scale (//: longer than drawn); white lines: heads"
        self.write(0, 0.74, scale, size=9, color=FAINT)
        ranks = range(planned.size) if planned.size <= len(COLOURS) else (0, planned.size // 2, planned.size - 1)
        entries = [(self.colours[rank], f"rank {rank}: {size(planned.parameter_bytes[rank])}") for rank in ranks]
        x = 0.0
        for colour, text in [*entries, (WHOLE, "every rank, whole")]:
            self.rectangle(x, 0.3, 0.2, 0.2, colour)
            self.write(x + 0.28, 0.4, text, size=9.5)
            x += 0.6 + 0.072 * len(text)

    def block(self, block: Block) -> None:
        """A block: ground, title and weights; in a row, lower weights are centred."""
        self.rectangle(block.x, block.top - block.height, block.right - block.x, block.height, GROUND)
        x, top = block.x + MARGIN, block.top - TITLE
        self.write(x, block.top - 0.2, block.title, size=10.5, weight="bold")
        for weight in block.weights:
            if block.is_stacked:
                self.weight(weight, x, top)
                top -= weight.height + CAPTION
            else:
                self.weight(weight, x, top - (block.inner - weight.height) / 2)
                x += weight.pitch

    def weight(self, weight: Weight, x: float, top: float) -> None:
        """A weight with its upper left corner at (x, top), its bias, and its captions."""
        below, width, height = top - weight.height, weight.width, weight.height
        for card in range(min(weight.copies - 1, 2), 0, -1):  # experts are alike
            shift, edge = 0.07 * card, {"edgecolor": "#aeb5bf", "linewidth": 0.6}
            self.rectangle(x + shift, below + shift, width, height, "#eef0f3", **edge)
        self.shards(weight, weight.parameter, x, below, height)
        style: dict[str, Any] = {
            "size": 9,
            "ha": "center",
            "bbox": {"facecolor": GROUND, "edgecolor": "none", "pad": 1},
        }
        for side, features, at in zip((height, width), weight.features, ((0, 0.64), (0.36, 0)), strict=True):
            if side == LONGEST and features > 0:
                self.write(x + at[0] * width, below + at[1] * height, "//", **style)
        if weight.bias is not None:
            below -= 0.13
            self.shards(weight, weight.bias, x, below, 0.09)
        experts = f"{weight.copies} experts, " if weight.copies > 1 else ""
        caption = experts + " \u2192 ".join(str(length) for length in weight.features if length)
        self.write(x, below - 0.14, weight.label, size=8.5, weight="bold")
        self.write(x, below - 0.29, caption, size=7.5, color=FAINT)
        self.write(x, below - 0.44, weight.caption, size=7.5, color=FAINT)

    def shards(self, weight: Weight, parameter: Parameter, x: float, y: float, height: float) -> None:
        """Each rank's shard in its colour; a part that several ranks hold has their stripes."""
        width = weight.width
        if parameter.layout is None or parameter.whole_because is not None:
            self.rectangle(x, y, width, height, WHOLE)
            return
        split, columns = parameter.layout.split, weight.by_column or len(parameter.shape) == 1
        holders: dict[Range, list[int]] = {}
        for rank, ranges in enumerate(split.ranges):
            for held in ranges:
                holders.setdefault(held, []).append(rank)
        for (start, stop), ranks in holders.items():
            first, last = start / split.length, stop / split.length
            stripes = 1 if len(ranks) == 1 else len(ranks) * max(1, 8 // len(ranks))
            for stripe in range(stripes):
                colour, one, next_one = (
                    self.colours[ranks[stripe % len(ranks)]],
                    stripe / stripes,
                    (stripe + 1) / stripes,
                )
                across, down = ((first, last), (one, next_one)) if columns else ((one, next_one), (first, last))
                piece = ((across[1] - across[0]) * width, (down[1] - down[0]) * height)
                self.rectangle(x + across[0] * width, y + (1 - down[1]) * height, *piece, colour)
            text = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
            sides = ((last - first) * width, height) if columns else (width, (last - first) * height)
            if sides[0] > 0.02 + 0.09 * len(text) and sides[1] > 0.11:
                shade = {"boxstyle": "round,pad=0.2", "facecolor": "#0000003c", "edgecolor": "none"}
                style: dict[str, Any] = {"size": 9.5, "weight": "bold", "color": "white", "ha": "center"}
                middle = (first + last) / 2
                at = (x + middle * width, y + height / 2) if columns else (x + width / 2, y + (1 - middle) * height)
                self.write(*at, text, **style, bbox=shade if len(ranks) > 1 else None)
        side, heads = width if columns else height, parameter.heads or 1
        lines = [(head / heads, min(0.45, 8 * side / heads)) for head in range(1, heads)]
        narrowest = min((stop - start for start, stop in holders if stop > start), default=0) / split.length
        ends = {end for held in holders for end in held} - {0, split.length}
        for share, points in [*lines, *((end / split.length, min(1.6, 14 * side * narrowest)) for end in ends)]:
            line = ([x + share * width] * 2, [y, y + height])
            if not columns:
                line = ([x, x + width], [y + (1 - share) * height] * 2)
            self.axes.plot(*line, color="white", linewidth=points, solid_capstyle="butt")
