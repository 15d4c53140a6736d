"""Mixers that are no attention: the parts of their parameters, and how heads and groups are cut over the ranks.

    mixers:
      layers.*.mamba:
        input: {in_proj: [value, value, key, key, head]}        gate, x, B, C, dt
        local: {conv1d: [value, key, key], A_log: head}

A part has something for every head: a number (`head`) or features (`value`); or features for every group (`key`). A
list in a list is stored group after group. Groups are to heads what KV heads are to query heads: a rank has whole
groups, or a part of the heads of one, whose features it holds like other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..anatomy.mixers import (
    CONVOLVED_WIDTH,
    GROUP_COUNTS,
    HEAD_COUNTS,
    KEY_WIDTHS,
    VALUE_WIDTHS,
    mixed_length,
    mixer_counts,
)
from ..anatomy.names import fold_layers, inner, is_inside
from ..errors import hint_for, shown
from ..slices.layout import Range, Split, heads, packed
from .parse import is_name, names_of, rule_arguments
from .pattern import Pattern
from .rule import Rule

PARTS = ("value", "key", "head")

Parts = tuple[str | tuple[str, ...], ...]

MIXER_RULES: Mapping[str, str] = {
    "input": "colwise",
    "local": "channelwise",
    "inner": "rowwise_inner",
    "norm": "gated_norm",
    "output": "rowwise",
}
"""Rules of a mixer's children, by role, where a plan has none for them."""
GATHERED: Mapping[str, str] = {"colwise": "colwise_rep", "rowwise": "rowwise_rep"}
"""Rules in place of these where every rank computes all heads."""

STATES = "states"
"""Role of states that the forward is given: `argument.index`, with something for heads or groups along dim 1."""


@dataclass(frozen=True)
class Mixer(Pattern):
    """The modules that match `pattern` mix tokens with heads: their parameters are cut part by part."""

    children: Mapping[str, Mapping[str, Parts]]
    """Role (one of MIXER_RULES, or STATES) -> name of a child module, parameter or buffer -> its parts."""
    optional: bool = False


@dataclass(frozen=True)
class MixerHeads:
    """How the heads of one mixer are cut."""

    heads: Split
    groups: Split
    widths: Mapping[str, int]
    """Features of a head (`value`) and of a group (`key`)."""
    splits: Mapping[str, Split] = field(default_factory=dict)
    """Child, or state -> how its features are cut; empty where every rank has all heads."""
    local: tuple[str, ...] = ()
    """Children that the mixer's own forward reads."""
    states: tuple[str, ...] = ()
    """States that it is given."""
    convolved: Split | None = None

    def attributes(self, rank: int) -> dict[str, int]:
        """The module's own counts and widths on `rank`, by the names that transformers uses."""
        own_heads, own_groups = self.heads.widths[rank], self.groups.widths[rank]
        return {
            **dict.fromkeys(HEAD_COUNTS, own_heads),
            **dict.fromkeys(GROUP_COUNTS, own_groups),
            **dict.fromkeys(VALUE_WIDTHS, own_heads * self.widths["value"]),
            **dict.fromkeys(KEY_WIDTHS, own_groups * self.widths["key"]),
            **({CONVOLVED_WIDTH: self.convolved.widths[rank]} if self.convolved is not None else {}),
        }


def mixer_arguments(pattern: str, entry: Any, faults: list[str]) -> dict[str, Any]:
    """The arguments of `Mixer` for a line of the section `mixers`."""
    options = dict(entry) if isinstance(entry, Mapping) else {}
    optional = options.pop("optional", False)
    children = {role: _children(value) for role, value in options.items()}
    if not isinstance(optional, bool) or children.keys() - {*MIXER_RULES, STATES} or None in children.values():
        faults.append(
            f"mixer {pattern}: {shown(entry)} does not map {', '.join((*MIXER_RULES, STATES))} to names, or to names "
            f"and their parts ({', '.join(PARTS)})"
        )
        children = {}
    elif not children.get("output"):
        faults.append(f"mixer {pattern}: it has no output")
    return {"pattern": pattern, "children": children, "optional": optional is True, "in_base_model": True}


def mixer_rules(pattern: str, children: Mapping[str, Mapping[str, Parts]]) -> Iterator[dict[str, Any]]:
    """The arguments of `Rule` for the children of a mixer at `pattern`; those that a module lacks are skipped."""
    for role, names in children.items():
        for name in names if role in MIXER_RULES else ():
            yield rule_arguments(f"{pattern}.{name}", MIXER_RULES[role], "optional", []) or {}


def _children(value: Any) -> dict[str, Parts] | None:
    """Child -> its parts; None where `value` says otherwise."""
    if not isinstance(value, Mapping):
        names = names_of(value or ())
        return None if names is None else dict.fromkeys(names, ("value",))
    found = {name: _parts(parts) for name, parts in value.items()}
    return None if None in found.values() or not all(map(is_name, found)) else found  # type: ignore[return-value]


def _parts(value: Any) -> Parts | None:
    parts = (value,) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts:
        return None
    found = tuple(tuple(part) if isinstance(part, list) else part for part in parts)
    flat = [name for part in found for name in (part if isinstance(part, tuple) else (part,))]
    return found if flat and all(name in PARTS for name in flat) else None


def cut_mixers(
    mixers: Sequence[Mixer],
    modules: Mapping[str, nn.Module],
    prefix: str,
    size: int,
    faults: list[str],
    splits: dict[str, Split],
    whole: dict[str, str],
    module_rules: dict[str, Rule],
) -> dict[str, MixerHeads]:
    """Cut every mixer by whole heads.

    Where there are more ranks than heads, projections are cut by features, and their outputs gathered.

    Args:
        faults: list to which faults are added.
        splits: children by their full names, to which those of the mixers are added.
        whole: child -> its mixer; those are added that every rank holds, there being fewer heads than ranks.
        module_rules: the rule of every module that has one; those of projections change that are gathered.
    """
    cut: dict[str, MixerHeads] = {}
    for mixer in mixers:
        names = list(mixer.match(modules, prefix))
        if not names and not mixer.optional:
            hint = hint_for(faults, mixer.full(prefix), map(fold_layers, modules))
            faults.append(f"mixer {mixer.full(prefix)}: matches no module{hint}")
        for name in names:
            stated = mixer.children.get(STATES, {})
            named = {role: children for role, children in mixer.children.items() if role != STATES}
            own = {role: dict(_present(modules[name], children)) for role, children in named.items()}
            absent = [role for role, found in own.items() if not found and role != "norm"]
            if absent:
                if not mixer.optional:
                    faults.append(f"mixer {fold_layers(name)}: it has no {' and no '.join(absent)} of those names")
                continue
            children = [f"{name}.{child}" for found in own.values() for child in found]
            try:
                found = _cut(modules[name], own, stated, size)
            except ValueError as error:
                faults.append(f"mixer {fold_layers(name)}: {error}")
                continue
            cut[name] = found
            splits.update({f"{name}.{child}": split for child, split in found.splits.items()})
            if not found.splits:
                gathered = {
                    child: replace(module_rules[child], strategy=GATHERED[module_rules[child].strategy_name])
                    for child in children
                    if child in module_rules and module_rules[child].strategy_name in GATHERED
                }
                module_rules.update(gathered)
                ruled = (child for child in module_rules if is_inside(child, name))
                whole.update((child, name) for child in (*children, *ruled) if child not in gathered)
    return cut


def _present(module: nn.Module, children: Mapping[str, Parts]) -> Iterator[tuple[str, Parts]]:
    """The children that the module has; norms may be left out by a config."""
    for child, parts in children.items():
        found = inner(module, child)
        if found is not None and not isinstance(found, nn.Identity):
            yield child, parts


def _cut(
    module: nn.Module, own: Mapping[str, Mapping[str, Parts]], stated: Mapping[str, Parts], size: int
) -> MixerHeads:
    """The heads of one mixer with the children `own` and the states `stated`.

    Raises ValueError where its parameters are not made up of their parts.
    """
    lengths = {
        child: mixed_length(inner(module, child), is_output=role in ("output", "inner"))
        for role, children in own.items()
        for child in children
    }
    parts = {child: found for children in own.values() for child, found in children.items()}
    width = lengths[next(iter(own["output"]))]
    readers = dict.fromkeys(("", *(child.rpartition(".")[0] for child in own.get("local", ()))))
    head_count, group_count = mixer_counts([module.get_submodule(name) for name in readers], width)
    whole = {"head": head_count, "value": width, "key": 0}
    for child, found in parts.items():
        flat = _flat(found)
        if "key" in flat and (len(flat) > 1 or not whole["key"]):
            whole["key"] = (lengths[child] - sum(whole[part] for part in flat if part != "key")) // flat.count("key")
            if len(flat) > 1:
                break
    if width % head_count or whole["key"] % group_count or whole["key"] < 0:
        raise ValueError(f"{width} and {whole['key']} features are not {head_count} heads and {group_count} groups")
    widths = {"value": width // head_count, "key": whole["key"] // group_count, "head": 1}
    if size > head_count:
        every_head, every_group = (Split(count, (((0, count),),) * size) for count in (head_count, group_count))
        return MixerHeads(every_head, every_group, widths, local=tuple(own.get("local", ())))
    by_head, by_group = heads(head_count, group_count, size)
    cut = MixerHeads(by_head, by_group, widths)
    splits = {}
    for child, found in parts.items():
        single = found[0] if len(found) == 1 else None
        if isinstance(single, str):
            unit = by_group if single == "key" else by_head
            if lengths[child] % unit.length:
                raise ValueError(f"{lengths[child]} features of {child} are not those of {unit.length} heads or groups")
            splits[child] = unit.scaled(lengths[child] // unit.length)
            continue
        if sum(whole[part] for part in _flat(found)) != lengths[child]:
            raise ValueError(f"{lengths[child]} features of {child} are not its parts, {shown(list(found))}")
        splits[child] = packed([_split(part, cut) for part in found])
    convolved = [split for split in splits.values() if split.length == vars(module).get(CONVOLVED_WIDTH)]
    splits |= {state: packed([_split(part, cut) for part in found]) for state, found in stated.items()}
    return MixerHeads(
        by_head,
        by_group,
        cut.widths,
        splits,
        tuple(own.get("local", ())),
        tuple(stated),
        convolved[0] if convolved else None,
    )


def _flat(parts: Parts) -> list[str]:
    return [name for part in parts for name in (part if isinstance(part, tuple) else (part,))]


def _split(part: str | tuple[str, ...], cut: MixerHeads) -> Split:
    """Split of a part's features; of parts that are stored group after group."""
    if part == "key":
        return cut.groups.scaled(cut.widths["key"])
    if isinstance(part, str):
        return cut.heads.scaled(cut.widths[part])
    per_group = cut.heads.length // cut.groups.length
    stored = sum(cut.widths[name] * (1 if name == "key" else per_group) for name in part)
    held: list[tuple[Range, ...]] = []
    for own_heads, own_groups in zip(cut.heads.ranges, cut.groups.ranges, strict=True):
        ranges: list[Range] = []
        for group in (group for start, stop in own_groups for group in range(start, stop)):
            base, first = group * stored, group * per_group
            for name in part:
                width = cut.widths[name]
                if name == "key":
                    ranges.append((base, base + width))
                    base += width
                    continue
                for start, stop in own_heads:
                    low, high = max(start, first), min(stop, first + per_group)
                    if low < high:
                        ranges.append((base + (low - first) * width, base + (high - first) * width))
                base += per_group * width
        held.append(tuple(ranges))
    return Split(cut.groups.length * stored, tuple(held))
