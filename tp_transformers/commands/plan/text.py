"""Each rank's share of a model as text: a tree of parameters, in which like layers and ranks that agree are folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ...anatomy.names import folded, layer_number
from ...text import size, spans
from .memory import MemoryPlan, Parameter

T = TypeVar("T")


@dataclass
class Node:
    """A module of the tree, or a parameter."""

    children: dict[str, Node] = field(default_factory=dict)
    row: tuple[str, str, str] | None = None
    """Cells of its line: (in the unsharded model, on the ranks, strategy)."""

    def key(self) -> object:
        """The key of a node; nodes of one key are folded."""
        return self.row, tuple((name, child.key()) for name, child in self.children.items())


def tree(planned: MemoryPlan) -> list[tuple[str, ...]]:
    """The lines of the tree as rows: an indented name, its cells."""
    root = Node()
    for parameter in planned.parameters:
        on_ranks = [_shape(parameter.local_shape(rank)) for rank in range(planned.size)]
        _descend(root, parameter.name).row = (_shape(parameter.shape), by_rank(on_ranks), _how(parameter))
    for heads in planned.heads:
        on_ranks = [f"{query}/{kv} heads" for query, kv in heads.ranks]
        _descend(root, heads.name).row = ("{}/{} heads".format(*heads.whole), by_rank(on_ranks), "")
    return list(_lines(_folded(root), 0))


def table(planned: MemoryPlan) -> list[tuple[str, ...]]:
    """A row of titles, then one for ranks that agree: heads, if all attention has as many, and bytes."""
    held = zip(planned.parameter_bytes, planned.cache_bytes, planned.total_bytes, strict=True)
    alike = {heads.ranks for heads in planned.heads}
    heads = [f"{query}/{kv}" for query, kv in alike.pop()] if len(alike) == 1 else ["-"] * planned.size
    rows = [
        (count, *map(size, (parameters, planned.buffer_bytes, cache, total)))
        for count, (parameters, cache, total) in zip(heads, held, strict=True)
    ]
    titles = ("", "query/KV heads", "parameters", "buffers", "KV cache", "total")
    return [titles, *((f"{_ranks(ranks)}", *row) for row, ranks in _alike(rows).items())]


def cache_lines(planned: MemoryPlan) -> list[str]:
    """Lines of the KV cache: layers, and their tokens."""
    return [
        f"{pattern.replace('*', spans(layer_number(name) or 0 for name in names), 1)}: {tokens} tokens"
        for pattern, by_tokens in folded((cached.name, cached.tokens) for cached in planned.cached).items()
        for tokens, names in by_tokens.items()
    ]


def whole_lines(planned: MemoryPlan) -> list[str]:
    """Lines of replicated parameters: bytes, number and reason."""
    held: dict[str, list[int]] = {}
    for parameter in planned.parameters:
        if parameter.whole_because is not None:
            held.setdefault(parameter.whole_because, []).append(parameter.nbytes)
    return [f"{size(sum(nbytes))} in {len(nbytes)} parameters: {why}" for why, nbytes in held.items()]


def _shape(lengths: Sequence[int]) -> str:
    return " x ".join(map(str, lengths)) or "scalar"


def by_rank(values: Sequence[str]) -> str:
    """Each rank's value, in ranks that agree; alone if all do."""
    alike = _alike(values)
    if len(alike) == 1:
        return values[0]
    return ", ".join(f"{value} ({_ranks(ranks)})" for value, ranks in alike.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"


def _alike(values: Iterable[T]) -> dict[T, list[int]]:
    """Value -> the ranks that have it."""
    ranks: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _descend(root: Node, name: str) -> Node:
    """The node of a module or parameter; nodes above it are made if needed."""
    for step in name.split("."):
        root = root.children.setdefault(step, Node())
    return root


def _how(parameter: Parameter) -> str:
    """The strategy of a parameter, or the reason why it is replicated; shared parts and tied names."""
    words = [f"whole: {parameter.whole_because}" if parameter.whole_because else str(parameter.strategy)]
    if parameter.layout is not None and (holders := parameter.layout.split.holders):
        words.append(f"some of it on {' or '.join(sorted({str(len(ranks)) for ranks in holders}))} ranks at once")
    if parameter.tied:
        words.append(f"tied to {', '.join(parameter.tied)}")
    return "; ".join(words)


def _folded(node: Node) -> Node:
    """The same tree, in which like children with numbers are one, labelled with their numbers."""
    kinds: dict[object, tuple[Node, list[str]]] = {}
    for name, child in node.children.items():
        folded = _folded(child)
        key = folded.key() if name.isdigit() else name
        kinds.setdefault(key, (folded, []))[1].append(name)
    node.children = {
        spans(map(int, names)) if names[0].isdigit() else names[0]: child for child, names in kinds.values()
    }
    return node


def _lines(node: Node, depth: int) -> Iterator[tuple[str, ...]]:
    for name, child in node.children.items():
        label = "  " * depth + name
        while child.row is None and len(child.children) == 1:  # an only child
            ((step, child),) = child.children.items()
            label = f"{label}.{step}"
        if child.row is None and child.children and all(re.fullmatch(r"[\d, -]+", step) for step in child.children):
            for step, layer in child.children.items():  # a stack of layers that differ
                yield (f"{label}.{step}", *(layer.row or _NO_CELLS))
                yield from _lines(layer, depth + 1)
            continue
        yield (label, *(child.row or _NO_CELLS))
        yield from _lines(child, depth + 1)


_NO_CELLS = ("", "", "")
