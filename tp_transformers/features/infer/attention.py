"""Roles of the features of attention's projections (query, key, value, and head), from the features they reach.

In the input of the output projection, a query feature reaches its head for its own token; a key feature reaches all
heads of its group, for other tokens too; a value feature reaches one feature of every head of its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from .block import Refused
from .reach import Link


@dataclass
class Roles:
    """Roles of the modules that feed an output projection, by the names of a plan's attention."""

    query: int
    kv: int
    head_dim: int
    """Features per head in the output projection's input."""
    by_module: dict[str, str] = field(default_factory=dict)
    """Module -> its role; "latent" for the projection to the rotary key of latent attention."""
    parts: tuple[str, ...] = ()
    """The parts of a fused projection, in order."""
    shared: set[str] = field(default_factory=set)
    """Other modules that these may feed: the projection of the latent."""


_OF_GROUPS = ("key", "value")
Feature = tuple[str, int]
"""(kind of a feature: "query", "key", "value" or "gate"; its head or KV group, or -1 for several)."""


def attention_roles(links: Mapping[str, Link], embeddings: set[str]) -> Roles:
    """Find the roles of the modules of `links`, which feed one output projection.

    Raises Refused if a plan cannot name such attention.
    """
    heads = _heads(links)
    roles = Roles(len(heads), 0, len(heads[0]))
    rows = {name: _rows(link, roles.head_dim) for name, link in links.items()}
    groups = sorted(
        {reached for name in rows.keys() - embeddings for kind, reached in rows[name] if kind in _OF_GROUPS}
    )
    kv_groups = [reached for reached in groups if len(reached) == min(map(len, groups))]
    if not kv_groups or [head for reached in kv_groups for head in reached] != list(range(roles.query)):
        raise Refused(f"its keys and values are not those of groups of its {roles.query} query heads")
    roles.kv = len(kv_groups)
    sequences = {name: [_feature(kind, reached, kv_groups) for kind, reached in kinds] for name, kinds in rows.items()}
    for name, sequence in sequences.items():
        roles.by_module[name] = _role(name, sequence, roles, name in embeddings)
    present = set(roles.by_module.values())
    if not any(needed <= present for needed in _COMPLETE):
        raise Refused(f"it has {', '.join(sorted(present))}, which is no complete attention")
    if "latent" in present:
        roles.shared |= {name for name, role in roles.by_module.items() if role == "key_value"}
    return roles


ENOUGH = 16
"""Minimum number of features seen in order; unseen features are then assumed to be in order."""
_COMPLETE = ({"query", "key", "value"}, {"fused"}, {"interleaved"}, {"query", "key_value"})


def feature_order(made: Sequence[int | None], width: int) -> tuple[str, int]:
    """Find the order of the features that indices make: ("in order" or "alternating", repeats of each feature).

    None is an index that made nothing, because its activation was zero. Raises Refused for any other order.
    """
    times = len(made) // width
    in_order = list(range(width)) * times
    alternating = [feature for feature in range(width) for _ in range(times)]
    for order, expected in (("in order", in_order), ("alternating", alternating)):
        matches = [actual == wanted for actual, wanted in zip(made, expected, strict=False) if actual is not None]
        if len(made) == len(expected) and all(matches) and len(matches) >= min(len(made) / 2, ENOUGH):
            return order, times
    raise Refused("its features are in an order that no rule describes")


def _heads(links: Mapping[str, Link]) -> list[tuple[int, ...]]:
    """Find the features of every query head. Raises Refused without queries, or if head widths differ."""
    reached = {
        tuple(row.nonzero().flatten().tolist())
        for link in links.values()
        for row, mixes in zip(link.reaches, link.mixes, strict=True)
        if not mixes and row.sum() > 1
    }
    heads = sorted(reached)
    width = next(iter(links.values())).reaches.shape[1]
    if not heads:
        raise Refused("features of several tokens are mixed, but not by queries, keys and values")
    if [feature for head in heads for feature in head] != list(range(width)) or len(set(map(len, heads))) > 1:
        raise Refused("its query heads overlap, or are not of one width")
    return heads


def _rows(link: Link, head_dim: int) -> list[tuple[str, tuple[int, ...]]]:
    """(kind, heads that it reaches) of every output feature."""
    rows = []
    for row, mixes in zip(link.reaches, link.mixes, strict=True):
        reached = tuple(sorted({int(feature) // head_dim for feature in row.nonzero().flatten()}))
        rows.append((_kind(row, bool(mixes), len(reached), head_dim), reached))
    return rows


def _kind(row: Tensor, mixes: bool, reached: int, head_dim: int) -> str:
    count = int(row.sum())
    if not count:
        return "nothing"
    if not mixes:
        return "gate" if count == 1 < head_dim else "query"
    return "value" if count == reached < reached * head_dim else "key" if count == reached * head_dim else "unknown"


def _feature(kind: str, reached: tuple[int, ...], groups: list[tuple[int, ...]]) -> Feature:
    if kind in _OF_GROUPS:
        return kind, groups.index(reached) if reached in groups else -1
    return kind, reached[0] if len(reached) == 1 else -1


def _role(name: str, sequence: list[Feature], roles: Roles, is_embedding: bool) -> str:
    """Find the role of one module. Raises Refused if no role fits its features."""
    kinds = {kind for kind, _ in sequence}
    if is_embedding and [head for _, head in sequence] == list(range(roles.query)):
        return "with_query"
    ranges = [(unit, len(list(same))) for unit, same in groupby(sequence)]
    if kinds == {"key", "value"} and roles.kv == roles.query and _in_order([head for _, head in sequence], roles.kv):
        return "key_value"
    if kinds <= {"query", "gate"} and _in_order([head for _, head in sequence], roles.query):
        return "query" if "query" in kinds else "with_query"
    if kinds in ({"key"}, {"value"}) and _in_order([group for _, group in sequence], roles.kv):
        return kinds.pop()
    if kinds <= {"nothing", "key"} and all(group == -1 or roles.kv == 1 for kind, group in sequence if kind == "key"):
        return "latent"
    if kinds == {"query", "key", "value"} and len({length for _, length in ranges}) == 1:
        units = [unit for unit, _ in ranges]
        counts = {"query": roles.query, "key": roles.kv, "value": roles.kv}
        parts = tuple(kind for kind, _ in groupby(kind for kind, _ in units))
        if len(parts) == 3 and units == [(kind, head) for kind in parts for head in range(counts[kind])]:
            roles.parts = parts
            return "fused"
        heads_per_group = roles.query // roles.kv
        grouped = [
            [
                *(("query", group * heads_per_group + head) for head in range(heads_per_group)),
                ("key", group),
                ("value", group),
            ]
            for group in range(roles.kv)
        ]
        if units == [unit for group in grouped for unit in group]:
            return "interleaved"
    raise Refused(f"{name} makes {_draw(sequence)}, a layout that no role describes")


def _in_order(heads: list[int], count: int) -> bool:
    """True if the features belong to heads 0, 1, ... of equal width."""
    per_head = len(heads) // count
    return heads == [head for head in range(count) for _ in range(per_head)]


def _draw(sequence: list[Feature]) -> str:
    """Describe the layout of a projection by ranges of one kind: "query 0-3, value 0-3, ..."."""
    ranges = []
    for kind, features in groupby(sequence, key=lambda unit: unit[0]):
        heads = [head for _, head in features]
        ranges.append(f"{kind} {min(heads)}-{max(heads)}" if min(heads) < max(heads) else f"{kind} {heads[0]}")
    return ", ".join(ranges[:6]) + (", ..." if len(ranges) > 6 else "")
