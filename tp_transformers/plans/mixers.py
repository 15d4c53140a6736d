"""Mixers other than attention: the parts of their parameters, and the sharding of heads and groups.

    mixers:
      layers.*.mamba:
        input: {in_proj: [value, value, key, key, head]}        gate, x, B, C, dt
        local: {conv1d: [value, key, key], A_log: head}

A part holds one number per head (`head`), features per head (`value`), or features per group (`key`). The parts of a
nested list are interleaved by group. Groups relate to heads as KV heads to query heads: a rank holds complete groups,
or some heads of one group and a replica of that group's features.
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
"""Rules of a mixer's children, by role, unless the plan has rules for them."""
GATHERED: Mapping[str, str] = {"colwise": "colwise_rep", "rowwise": "rowwise_rep"}
"""Replacements of these rules if every rank computes all heads."""

STATES = "states"
"""Role of states among the arguments of the forward: `argument.index`, with heads or groups along dim 1."""


@dataclass(frozen=True)
class Mixer(Pattern):
    """Mixers that match `pattern`: their parameters are sharded part by part."""

    children: Mapping[str, Mapping[str, Parts]]
    """Role (one of MIXER_RULES, or STATES) -> name of a child module, parameter or buffer -> its parts."""
    optional: bool = False


@dataclass(frozen=True)
class MixerHeads:
    """Splits of the heads and groups of one mixer."""

    heads: Split
    groups: Split
    widths: Mapping[str, int]
    """Features per head (`value`) and per group (`key`)."""
    splits: Mapping[str, Split] = field(default_factory=dict)
    """Child or state -> split of its features; empty if every rank has all heads."""
    local: tuple[str, ...] = ()
    """Children that the mixer's own forward reads."""
    states: tuple[str, ...] = ()
    """States that its forward takes."""
    convolved: Split | None = None

    def attributes(self, rank: int) -> dict[str, int]:
        """Local head counts, group counts and widths on `rank`, by their attribute names in transformers."""
        own_heads, own_groups = self.heads.widths[rank], self.groups.widths[rank]
        return {
            **dict.fromkeys(HEAD_COUNTS, own_heads),
            **dict.fromkeys(GROUP_COUNTS, own_groups),
            **dict.fromkeys(VALUE_WIDTHS, own_heads * self.widths["value"]),
            **dict.fromkeys(KEY_WIDTHS, own_groups * self.widths["key"]),
            **({CONVOLVED_WIDTH: self.convolved.widths[rank]} if self.convolved is not None else {}),
        }


def mixer_arguments(pattern: str, entry: Any, faults: list[str]) -> dict[str, Any]:
    """Arguments of `Mixer` for a line of the section `mixers`."""
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
    """Arguments of `Rule` for the children of a mixer at `pattern`; a module may lack some of them."""
    for role, names in children.items():
        for name in names if role in MIXER_RULES else ():
            yield rule_arguments(f"{pattern}.{name}", MIXER_RULES[role], "optional", []) or {}


def _children(value: Any) -> dict[str, Parts] | None:
    """Child -> its parts; None if `value` is malformed."""
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
    """Shard every mixer by complete heads.

    If there are more ranks than heads, shard projections by features and gather their outputs.

    Args:
        faults: list of faults; new ones are added.
        splits: full name of a child -> its split; those of the mixers are added.
        whole: replicated child -> its mixer; children of mixers with fewer heads than ranks are added.
        module_rules: module -> its rule; those of gathered projections are replaced.
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
    """Yield the children that the module has; a config may leave norms out."""
    for child, parts in children.items():
        found = inner(module, child)
        if found is not None and not isinstance(found, nn.Identity):
            yield child, parts


def _cut(
    module: nn.Module, own: Mapping[str, Mapping[str, Parts]], stated: Mapping[str, Parts], size: int
) -> MixerHeads:
    """Split the heads of one mixer with the children `own` and the states `stated`.

    Raises ValueError if the length of a parameter is not the sum of its parts.
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
    """Split of the features of a part, or of a tuple of parts that are interleaved by group."""
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
