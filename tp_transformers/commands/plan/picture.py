"""A drawing of how one layer, the embedding and the head are cut: every weight to scale, every rank in its colour.

Weights are drawn as x A multiplies by them: as high as there are input features, as wide as there are output features.
So what is cut column by column looks it.
"""

from __future__ import annotations

import os
from collections import Counter
from statistics import median
from typing import Any

from ...anatomy.linears import has_inputs_first
from ...anatomy.names import layer_name
from ...errors import UsageError, describe
from ...text import size
from .brush import COLOURS, FAINT, GUTTER, WHOLE, Block, Brush, Weight
from .memory import MemoryPlan, Parameter

INCHES = 1.05
"""Inches of the unit."""


def draw(planned: MemoryPlan, path: str) -> None:
    """Draw the picture to `path`, whose ending says the format.

    Raises UsageError without matplotlib, and where the file cannot be written.
    """
    picture = compose(planned)
    try:
        picture.savefig(path, dpi=200)
    except (OSError, ValueError) as error:
        fix = "Name a file that can be written, ending in .png, .svg or .pdf."
        raise UsageError(describe(f"--png {path}", got=str(error), expected="a picture's name", fix=fix)) from error


def compose(planned: MemoryPlan) -> Any:
    """The picture, a Figure of matplotlib. Raises UsageError without it, and of a model that has no layers."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fix = "pip install 'tp-transformers[picture]', or pip install matplotlib."
        raise UsageError(describe("--png", got="no matplotlib", expected="it to draw with", fix=fix)) from None
    layer, rows, vectors = _layer(planned)
    embedding, head = (_end(planned, module) for module in ("embedding", "head"))
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
    brush = Brush(axes, planned.size)
    _head(brush, planned, layer)
    for block in blocks:
        brush.panel(block)
    return figure


def _head(brush: Brush, planned: MemoryPlan, layer: str) -> None:
    """The title, and what the colours mean."""
    model = os.path.basename(os.path.normpath(planned.survey.name))
    brush.write(0, 1.02, f"{model} on {planned.size} rank{'s' * (planned.size > 1)}: {layer}", size=15, weight="bold")
    scale = "height: input features; width: output features; to scale (zigzag: longer than drawn); white lines: heads"
    brush.write(0, 0.74, scale, size=9, color=FAINT)
    ranks = range(planned.size) if planned.size <= len(COLOURS) else (0, planned.size // 2, planned.size - 1)
    legend = [(brush.colours[rank], f"rank {rank}: {size(planned.parameter_bytes[rank])}") for rank in ranks]
    x = 0.0
    for colour, text in [*legend, (WHOLE, "every rank, whole")]:
        brush.rectangle(x, 0.3, 0.2, 0.2, colour)
        brush.write(x + 0.28, 0.4, text, size=9.5)
        x += 0.6 + 0.072 * len(text)


def _layer(planned: MemoryPlan) -> tuple[str, list[Block], Block | None]:
    """A layer of the most common kind in the largest stack: its name, its blocks, and its vectors but for biases."""
    layers: dict[str, list[Parameter]] = {}
    for parameter in planned.parameters:
        layer = layer_name(parameter.name)
        if layer is not None:
            layers.setdefault(layer, []).append(parameter)
    stacks: Counter[str] = Counter()
    for name, held in layers.items():
        stacks[name.rpartition(".")[0]] += sum(parameter.nbytes for parameter in held)
    if not stacks:
        fix = "Leave out --png: there is no picture of such a model."
        raise UsageError(describe("--png", got="a model without layers", expected="a stack of layers", fix=fix))
    stack = stacks.most_common(1)[0][0]
    kinds: dict[object, list[str]] = {}
    for name, held in layers.items():
        if name.rpartition(".")[0] == stack:
            alike = tuple((one.name.removeprefix(name), one.shape, one.strategy) for one in held)
            kinds.setdefault(alike, []).append(name)
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
            weight = _weight(planned, parameter, own.rpartition(".")[2] if kind == "weight" else kind)
            weight.bias = named.get(f"{owner}.bias" if kind == "weight" else f"{name}_bias")
            child, *rest = own.split(".")
            block = f"{child}.{rest[0]}" if rest and rest[0].isdigit() else child
            rows.setdefault(block, []).append(weight)
        elif matrix is None or len(matrix.shape) == 1:
            label = own if kind == "weight" else f"{own}.{kind}"
            vectors.append(Weight(label, parameter, (0, parameter.shape[0]), "columns", _told(parameter)))
    blocks = [Block(_title(planned, layer, child), weights) for child, weights in rows.items()]
    return layer, blocks, Block("vectors", vectors, is_stacked=True) if vectors else None


def _title(planned: MemoryPlan, layer: str, child: str) -> str:
    """The name of a block of a layer, and the heads in it."""
    heads = next((one for one in planned.heads if f"{one.name}.".startswith(f"{layer}.{child}.")), None)
    return child if heads is None else f"{child}: {heads.whole[0]} query and {heads.whole[1]} KV heads"


def _end(planned: MemoryPlan, which: str) -> Block | None:
    """The embedding, or the head, if the model has one."""
    model = planned.survey.model
    module = model.get_input_embeddings() if which == "embedding" else model.get_output_embeddings()
    owners = [name for name, part in model.named_modules(remove_duplicate=False) if part is module and part is not None]
    for parameter in planned.parameters:
        for name in (parameter.name, *parameter.tied):
            owner = name.rpartition(".")[0]
            if owner in owners and len(parameter.shape) == 2:
                weight = _weight(planned, parameter, owner.rpartition(".")[2], owner)
                if name != parameter.name:
                    weight.told = f"tied to {parameter.name.removesuffix('.weight').rpartition('.')[2]}"
                return Block(which, [weight])
    return None


def _weight(planned: MemoryPlan, parameter: Parameter, label: str, owner: str | None = None) -> Weight:
    """A weight the way up in which inputs meet it."""
    module = planned.survey.model.get_submodule(owner or parameter.name.rpartition(".")[0])
    *experts, first, second = parameter.shape
    is_upright = has_inputs_first(module)
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
