"""What a drawing of weights consists of, and how it is painted: rectangles, to scale, every rank in its colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...slices.layout import Range
from .memory import Parameter

COLOURS = ("#3f74b8", "#ee9b45", "#56a578", "#c65b52", "#8a72b5", "#d8b840", "#58adc1", "#a37c63")
"""One a rank; more ranks share a colour map."""
WHOLE, INK, FAINT, GROUND = "#c9ced6", "#23272e", "#666e79", "#f4f5f7"

LONGEST = 2.7
"""Sides are drawn to scale up to this many times the layer's median side, and broken where they are longer."""
THINNEST = 0.1
"""The least side of a weight, in the same unit."""
GAP, CAPTION, TITLE, MARGIN, GUTTER = 0.3, 0.66, 0.42, 0.18, 0.16
"""Space between weights, below them for captions, above them for the title, around them, and between blocks."""


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


class Brush:
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
        self.write(x, below - 0.14, weight.label, size=8.5, weight="bold")
        self.write(x, below - 0.29, weight.sizes, size=7.5, color=FAINT)
        self.write(x, below - 0.44, weight.told, size=7.5, color=FAINT)

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
                style: dict[str, Any] = {"size": 9.5, "weight": "bold", "color": "white", "ha": "center"}
                middle = (piece[0] + piece[2] / 2, piece[1] + piece[3] / 2)
                self.write(*middle, text, **style, bbox=shade if len(ranks) > 1 else None)
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
