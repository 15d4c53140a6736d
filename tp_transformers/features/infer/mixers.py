"""Roles of the parts of a mixer (state spaces, delta nets, short convolutions), from the features that they reach.

In the input of the output projection, a value feature reaches only itself, a number per head reaches that head, and a
feature shared by a group of heads (B and C, query and key) reaches those heads. Mamba's inner projection takes all
values and reaches all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ...anatomy import CONVOLUTIONS, features, input_width, is_norm
from .block import Block, Refused
from .reach import Flow, Mixed

Element = tuple[str, int, bool]
"""(kind of an element: "value", "head" or "key"; its value, head or group; True if it reaches far tokens)."""


@dataclass(frozen=True)
class Heads:
    """Head and group counts of a mixer; the heads of a group share features."""

    width: int
    """Values of all heads."""
    heads: int
    groups: int

    def element(self, row: Tensor, is_far: bool) -> Element:
        """Classify an element that reaches the values of `row: bool (width)`."""
        reached = row.nonzero().flatten().tolist()
        if len(reached) == 1:
            return "value", reached[0], False
        for kind, count in (("head", self.heads), ("key", self.groups)):
            length = self.width // count
            if (
                len(reached) == length
                and reached == list(range(reached[0], reached[0] + length))
                and not reached[0] % length
            ):
                return kind, reached[0] // length, is_far
        raise Refused(f"it has features that reach {len(reached)} of {self.width} values, which no part does")


def mixer_block(consumer: str, flow: Flow, modules: Mapping[str, nn.Module]) -> Block | None:
    """Find the mixer with the output projection `consumer`; None if `consumer` is inside another mixer.

    Raises Refused if a plan cannot name such a mixer.
    """
    owner, width, reaches = consumer.rpartition(".")[0], input_width(modules[consumer]), flow.mixed[consumer].reaches
    if any(consumer in mixed.reaches for mixed in flow.mixed.values()):
        return None
    outside = [name for name in reaches if not name.startswith(f"{owner}.")]
    if outside:
        raise Refused(f"{min(outside)}, which is not in {owner}, comes before {consumer}")
    inner = {name for name in reaches if name in flow.mixed and input_width(modules[name]) == width}
    norms = {name for name in reaches if is_norm(modules.get(name.rpartition(".")[0], nn.Identity()))}
    elements, heads = _elements(flow.mixed[consumer], reaches.keys() - inner - norms, width)
    linears = [name for name in elements if name in modules]
    block = Block("mixer", owner, roles={role: {} for role in ("input", "local", "inner", "norm", "output")})

    def add(role: str, name: str, parts: list[Any]) -> None:
        if block.roles[role].setdefault(name.removeprefix(f"{owner}."), parts) != parts:
            raise Refused(f"the parameters of {name} do not have the same parts")
        block.rules[name] = None

    for name, parts in _parts(elements, linears, heads).items():
        is_local = name not in linears or not inner.isdisjoint(flow.links[name])
        add("local" if is_local else "input", _holder(name, owner, modules), parts)
    for name in inner:
        if not reaches[name].all():
            raise Refused(f"{name} takes all {width} values, and does not reach all of them")
        add("inner", name, ["value"])
    for name in norms:
        norm, length = name.rpartition(".")[0], len(reaches[name])
        if length == width:
            add("norm", norm, ["value"])
        elif reaches[name].all() or length == width // heads.heads:
            block.rules[norm] = "replicated_with_grad_allreduce"
        else:
            raise Refused(f"{norm} norms {length} features, which are neither those of a head nor of all")
    add("output", consumer, ["value"])
    for name in (*inner, *linears):
        readers = {reader for reader in flow.readers[name] if not reader.startswith(f"{owner}.")}
        if readers:
            raise Refused(f"{name} feeds {', '.join(sorted(readers))} too")
    block.roles = {role: children for role, children in block.roles.items() if children}
    block.remarks[owner] = "parts are what their features reached in a small model"
    return block


def _elements(mixed: Mixed, names: Collection[str], width: int) -> tuple[dict[str, list[Element]], Heads]:
    """Classify the elements of every name, and count heads and groups."""
    rows = {name: reaches for name, reaches in mixed.reaches.items() if name in names}
    sizes = sorted({int(size) for reaches in rows.values() for size in reaches.sum(1).unique()} - {0, 1}) or [1]
    if len(sizes) > 2 or any(width % size for size in sizes):
        listed = ", ".join(map(str, sizes))
        raise Refused(f"its features reach {listed} of {width} values, which are no heads and groups")
    heads = Heads(width, width // sizes[0], width // sizes[-1])
    none = torch.zeros(1, dtype=torch.bool)
    elements = {
        name: [
            heads.element(row, bool(far))
            for row, far in zip(reaches, mixed.far.get(name, none.expand(len(reaches))), strict=True)
        ]
        for name, reaches in rows.items()
    }
    return elements, heads


def _holder(name: str, owner: str, modules: Mapping[str, nn.Module]) -> str:
    """The linear or convolution with the parameter `name`; otherwise `name` itself."""
    module = name.rpartition(".")[0]
    if name in modules or module == owner:
        return name
    return module if isinstance(modules[module], CONVOLUTIONS) or features(modules[module]) is not None else name


def _parts(elements: Mapping[str, Sequence[Element]], linears: Collection[str], heads: Heads) -> dict[str, list[Any]]:
    """Find the parts of every child; `linears`: the linears among them.

    Several features that a group shares may be adjacent, as B and C. Those of a linear differ in the tokens that they
    reach, so the longest range of equal elements is as long as the features of a group.
    """
    range_lengths = {
        len(list(same)) for name in linears for element, same in groupby(elements[name]) if element[0] != "value"
    }
    failed = Refused("it has no parts")
    for key in sorted(range_lengths or {0}, reverse=True):
        try:
            return {
                name: _parts_of(name, [element[:2] for element in sequence], heads, key)
                for name, sequence in elements.items()
            }
        except Refused as refused:
            failed = refused
    raise failed


def _parts_of(name: str, sequence: Sequence[tuple[str, int]], heads: Heads, key: int) -> list[Any]:
    """The parts of a child: in sequence, or as one list of parts that repeats for every group."""
    flat = _match_parts(sequence, range(heads.width), range(heads.heads), range(heads.groups), key)
    if flat is not None:
        return flat
    if _is_head_after_head(sequence, heads):
        return ["value"]
    length, remainder = divmod(len(sequence), heads.groups)
    if not remainder:
        values, heads_per_group = heads.width // heads.groups, heads.heads // heads.groups
        group_parts = [
            _match_parts(
                sequence[group * length : (group + 1) * length],
                range(group * values, (group + 1) * values),
                range(group * heads_per_group, (group + 1) * heads_per_group),
                range(group, group + 1),
                key,
            )
            for group in range(heads.groups)
        ]
        if group_parts[0] is not None and all(parts == group_parts[0] for parts in group_parts):
            return [group_parts[0]]
    raise Refused(f"{name} is not made up of parts that are values, heads or groups in order")


def _is_head_after_head(sequence: Sequence[tuple[str, int]], heads: Heads) -> bool:
    """True if a child has equally many elements of every head, head after head, in any order within a head."""
    per_head, width = len(sequence) // heads.heads, heads.width // heads.heads
    owners = [index // width if kind == "value" else index for kind, index in sequence if kind != "key"]
    return owners == [head for head in range(heads.heads) for _ in range(per_head)]


def _match_parts(
    sequence: Sequence[tuple[str, int]], values: range, heads: range, groups: range, key: int
) -> list[Any] | None:
    """Split a sequence into parts; None if it does not consist of parts."""
    of_group = "head" if len(heads) == len(groups) else "key"
    candidates = {
        "value": [("value", index) for index in values],
        "head": [("head", index) for index in heads],
        "key": [(of_group, index) for index in groups for _ in range(key)],
    }
    parts, at = [], 0
    while at < len(sequence):
        for part, expected in candidates.items():
            if expected and sequence[at : at + len(expected)] == expected:
                parts.append(part)
                at += len(expected)
                break
        else:
            return None
    return parts
