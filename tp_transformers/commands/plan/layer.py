"""Weights of a drawing: those of one layer, the embedding and the head, in blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...anatomy.layers import first_alike
from ...anatomy.linears import has_inputs_first
from ...anatomy.names import layer_name
from ...errors import UsageError, describe
from .memory import MemoryPlan, Parameter

GAP, CAPTION, TITLE, MARGIN, GUTTER = 0.3, 0.66, 0.42, 0.18, 0.16
"""Space between weights, below them for captions, above them for the title, around them, and between blocks."""


@dataclass
class Weight:
    """A weight in the drawing; sides in units."""

    label: str
    parameter: Parameter
    features: tuple[int, int]
    """Input and output features, which are height and width; a vector has no input."""
    by_column: bool
    """True if the shards are columns of the drawing, False if they are rows."""
    caption: str
    """The strategy and its communication."""
    copies: int = 1
    """Number of experts."""
    bias: Parameter | None = None
    height: float = 0.0
    width: float = 0.0

    @property
    def pitch(self) -> float:
        """Width in a row, caption included."""
        return max(self.width, 0.084 * len(self.label), 0.066 * len(self.caption)) + GAP


@dataclass
class Block:
    """Weights beside each other, or one below the other if `is_stacked`, with a title."""

    title: str
    weights: list[Weight]
    is_stacked: bool = False
    x: float = 0.0
    top: float = 0.0
    right: float = 0.0

    @property
    def inner(self) -> float:
        """Height of the highest weight."""
        return max(weight.height + (0.13 if weight.bias is not None else 0) for weight in self.weights)

    @property
    def height(self) -> float:
        """Height, captions included."""
        if self.is_stacked:
            return TITLE + sum(weight.height + CAPTION for weight in self.weights)
        return TITLE + self.inner + CAPTION

    def place(self, x: float, top: float) -> None:
        """Set the upper left corner, and the least right side."""
        pitches = [weight.pitch for weight in self.weights]
        width = (max(pitches) if self.is_stacked else sum(pitches)) - GAP + 2 * MARGIN
        self.x, self.top, self.right = x, top, x + width


def typical_layer(planned: MemoryPlan) -> tuple[str, list[Block], Block | None]:
    """A layer of the most common kind in the largest stack: its name, its blocks, and its vectors except biases."""
    layers: dict[str, dict[str, Parameter]] = {}
    stacks: Counter[str] = Counter()
    for parameter in planned.parameters:
        layer = layer_name(parameter.name)
        if layer is not None:
            layers.setdefault(layer, {})[parameter.name] = parameter
            stacks[layer.rpartition(".")[0]] += parameter.nbytes
    if not stacks:
        fix = "Leave out --png: there is no picture of such a model."
        raise UsageError(describe("--png", got="a model without layers", expected="a stack of layers", fix=fix))
    stack = stacks.most_common(1)[0][0]
    kinds = {
        name: tuple((one.name.removeprefix(name), one.shape, one.strategy) for one in held.values())
        for name, held in layers.items()
        if name.rpartition(".")[0] == stack
    }
    layer = Counter(first_alike(kinds).values()).most_common(1)[0][0]
    named = layers[layer]
    rows: dict[str, list[Weight]] = {}
    vectors = []
    for name, parameter in named.items():
        owner, _, kind = name.rpartition(".")
        own, matrix = owner.removeprefix(f"{layer}."), named.get(f"{name.removesuffix('bias')}weight")
        if kind.endswith("_bias"):  # experts: their matrices are parameters of one module
            matrix = named.get(name.removesuffix("_bias"))
        if len(parameter.shape) > 1 and matrix in (None, parameter):
            weight = _weight(planned, parameter, own.rpartition(".")[2] if kind == "weight" else kind)
            weight.bias = named.get(f"{owner}.bias" if kind == "weight" else f"{name}_bias")
            child, *rest = own.split(".")
            rows.setdefault(f"{child}.{rest[0]}" if rest and rest[0].isdigit() else child, []).append(weight)
        elif matrix is None or len(matrix.shape) == 1:
            label = own if kind == "weight" else f"{own}.{kind}"
            vectors.append(Weight(label, parameter, (0, parameter.shape[0]), True, _caption(parameter)))
    blocks = []
    for child, weights in rows.items():
        heads = next((one.whole for one in planned.heads if f"{one.name}.".startswith(f"{layer}.{child}.")), None)
        blocks.append(Block(child if heads is None else "{}: {} query and {} KV heads".format(child, *heads), weights))
    return layer, blocks, Block("vectors", vectors, is_stacked=True) if vectors else None


def at_end(planned: MemoryPlan, which: str) -> Block | None:
    """The embedding or the head, if the model has one."""
    model = planned.survey.model
    module = model.get_input_embeddings() if which == "embedding" else model.get_output_embeddings()
    owners = [name for name, part in model.named_modules(remove_duplicate=False) if part is module and part is not None]
    for parameter in planned.parameters:
        for name in (parameter.name, *parameter.tied):
            owner = name.rpartition(".")[0]
            if owner in owners and len(parameter.shape) == 2:
                weight = _weight(planned, parameter, owner.rpartition(".")[2], owner)
                if name != parameter.name:
                    weight.caption = f"tied to {parameter.name.removesuffix('.weight').rpartition('.')[2]}"
                return Block(which, [weight])
    return None


def _weight(planned: MemoryPlan, parameter: Parameter, label: str, owner: str | None = None) -> Weight:
    """A parameter with its input features as rows."""
    is_upright = has_inputs_first(planned.survey.model.get_submodule(owner or parameter.name.rpartition(".")[0]))
    *experts, first, second = parameter.shape
    by_column = True
    if parameter.layout is not None:
        by_column = parameter.layout.dim - len(parameter.shape) != (-2 if is_upright else -1)
    features = (first, second) if is_upright else (second, first)
    return Weight(label, parameter, features, by_column, _caption(parameter), experts[0] if experts else 1)


def _caption(parameter: Parameter) -> str:
    """The strategy and the communication after it."""
    name = parameter.strategy or "no rule"
    if parameter.whole_because is not None or len(parameter.shape) == 3:  # experts: others sum their outputs
        return name
    gathers = name.endswith(("_rep", "_gather_output")) and "rowwise" not in name
    return name + (" \u2192 all-gather" if gathers else " \u2192 all-reduce" if "rowwise" in name else "")
