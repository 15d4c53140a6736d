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

from ...anatomy import fold_layers, inner, is_inside
from ...errors import hint_for, shown
from ...plans.binding import Binding
from ...plans.parse import is_name, names_of
from ...plans.rule import Entry, Rule, SplitHeads, set_own
from ...slices.layout import Range, Ranks, Split, heads, packed
from ...strategies import LocalConfig, ParamShard
from .counts import (
    CONVOLVED_WIDTH,
    GROUP_COUNTS,
    HEAD_COUNTS,
    KEY_WIDTHS,
    VALUE_WIDTHS,
    counts_heads_by_config,
    mixed_length,
    mixer_counts,
)
from .reading import mix_locally

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
class Mixer(Entry):
    """Mixers that match `pattern`: their parameters are sharded part by part."""

    section = "mixers"
    children: Mapping[str, Mapping[str, Parts]]
    """Role (one of MIXER_RULES, or STATES) -> name of a child module, parameter or buffer -> its parts."""

    @classmethod
    def parse(cls, pattern: str, value: Any, faults: list[str]) -> Mixer:
        options = dict(value) if isinstance(value, Mapping) else {}
        optional = options.pop("optional", False)
        children = {role: _children(names) for role, names in options.items()}
        known = {role: names for role, names in children.items() if names is not None}
        if not isinstance(optional, bool) or children.keys() - {*MIXER_RULES, STATES} or known != children:
            faults.append(
                f"mixer {pattern}: {shown(value)} does not map {', '.join((*MIXER_RULES, STATES))} to names, or to "
                f"names and their parts ({', '.join(PARTS)})"
            )
            known = {}
        elif not known.get("output"):
            faults.append(f"mixer {pattern}: it has no output")
        return cls(pattern, known, optional=optional is True, in_base_model=True)

    def rules(self) -> Iterator[Rule]:
        for role, names in self.children.items():
            for name in names if role in MIXER_RULES else ():
                yield Rule(f"{self.pattern}.{name}", MIXER_RULES[role], optional=True, in_base_model=True)


@dataclass(frozen=True)
class MixerHeads(SplitHeads):
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

    def count(self, model: nn.Module, name: str, rank: int) -> None:
        module: Any = model.get_submodule(name)
        if counts_heads_by_config(module):
            module.config = LocalConfig(module.config, **dict.fromkeys(HEAD_COUNTS, self.heads.widths[rank]))
        for owner in ("", *(child.rpartition(".")[0] for child in self.local)):
            set_own(model.get_submodule(f"{name}.{owner}".rstrip(".")), self.attributes(rank))

    def attach(self, model: nn.Module, name: str, shards: Mapping[str, ParamShard], rank: int) -> None:
        inside = tuple(f"{name}.{child}." for child in self.local)
        read = {param[len(name) + 1 :]: shard for param, shard in shards.items() if param.startswith(inside)}
        mix_locally(model.get_submodule(name), read, self.splits, self.states, rank)


def _children(value: Any) -> dict[str, Parts] | None:
    """Child -> its parts; None if `value` is malformed."""
    if not isinstance(value, Mapping):
        names = names_of(value or ())
        return None if names is None else dict.fromkeys(names, ("value",))
    parts_by_child = {name: _parts(parts) for name, parts in value.items()}
    return None if None in parts_by_child.values() or not all(map(is_name, parts_by_child)) else parts_by_child  # type: ignore[return-value]


def _parts(value: Any) -> Parts | None:
    parts = (value,) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts:
        return None
    normalised = tuple(tuple(part) if isinstance(part, list) else part for part in parts)
    flat = [name for part in normalised for name in (part if isinstance(part, tuple) else (part,))]
    return normalised if flat and all(name in PARTS for name in flat) else None


def split_mixers(mixers: Sequence[Mixer], bound: Binding) -> dict[str, MixerHeads]:
    """Shard every mixer by complete heads; see `Feature.split_heads`.

    If there are more ranks than heads, shard projections by features and gather their outputs: rules of projections
    are replaced.
    """
    modules, prefix, faults, module_rules = bound.modules, bound.prefix, bound.faults, bound.module_rules
    heads_by_mixer: dict[str, MixerHeads] = {}
    for mixer in mixers:
        names = list(mixer.match(modules, prefix))
        if not names and not mixer.optional:
            hint = hint_for(faults, mixer.full(prefix), map(fold_layers, modules))
            faults.append(f"mixer {mixer.full(prefix)}: matches no module{hint}")
        for name in names:
            states = mixer.children.get(STATES, {})
            roles = {role: children for role, children in mixer.children.items() if role != STATES}
            present = {role: dict(_present(modules[name], children)) for role, children in roles.items()}
            absent = [role for role, child_parts in present.items() if not child_parts and role != "norm"]
            if absent:
                if not mixer.optional:
                    faults.append(f"mixer {fold_layers(name)}: it has no {' and no '.join(absent)} of those names")
                continue
            children = [f"{name}.{child}" for child_parts in present.values() for child in child_parts]
            try:
                mixer_heads = _split_mixer(modules[name], present, states, bound.ranks)
            except ValueError as error:
                faults.append(f"mixer {fold_layers(name)}: {error}")
                continue
            heads_by_mixer[name] = mixer_heads
            bound.splits.update({f"{name}.{child}": split for child, split in mixer_heads.splits.items()})
            if not mixer_heads.splits:
                gathered = {
                    child: replace(module_rules[child], strategy=GATHERED[module_rules[child].strategy_name])
                    for child in children
                    if child in module_rules and module_rules[child].strategy_name in GATHERED
                }
                module_rules.update(gathered)
                ruled = (child for child in module_rules if is_inside(child, name))
                bound.replicated.update((child, name) for child in (*children, *ruled) if child not in gathered)
    faults.extend(
        f"{fold_layers(name)}: it is in a mixer with sharded heads, and no rule says how it is; name it there"
        for name in bound.parameters
        if name not in bound.param_rules and name.rpartition(".")[0] not in module_rules
        if any(is_inside(name, mixer) for mixer in heads_by_mixer)
    )
    return heads_by_mixer


def _present(module: nn.Module, children: Mapping[str, Parts]) -> Iterator[tuple[str, Parts]]:
    """Yield the children that the module has; a config may leave norms out."""
    for child, parts in children.items():
        child_module = inner(module, child)
        if child_module is not None and not isinstance(child_module, nn.Identity):
            yield child, parts


def _split_mixer(
    module: nn.Module, present: Mapping[str, Mapping[str, Parts]], states: Mapping[str, Parts], ranks: Ranks
) -> MixerHeads:
    """Split the heads of one mixer with the children `present` and the states `states`.

    Raises ValueError if the length of a parameter is not the sum of its parts.
    """
    lengths = {
        child: mixed_length(inner(module, child), is_output=role in ("output", "inner"))
        for role, children in present.items()
        for child in children
    }
    parts = {child: child_parts for children in present.values() for child, child_parts in children.items()}
    width = lengths[next(iter(present["output"]))]
    readers = dict.fromkeys(("", *(child.rpartition(".")[0] for child in present.get("local", ()))))
    head_count, group_count = mixer_counts([module.get_submodule(name) for name in readers], width)
    totals = {"head": head_count, "value": width, "key": 0}
    for child, child_parts in parts.items():
        flat = _flat(child_parts)
        if "key" in flat and (len(flat) > 1 or not totals["key"]):
            totals["key"] = (lengths[child] - sum(totals[part] for part in flat if part != "key")) // flat.count("key")
            if len(flat) > 1:
                break
    if width % head_count or totals["key"] % group_count or totals["key"] < 0:
        raise ValueError(f"{width} and {totals['key']} features are not {head_count} heads and {group_count} groups")
    widths = {"value": width // head_count, "key": totals["key"] // group_count, "head": 1}
    local = tuple(present.get("local", ()))
    if ranks.size > head_count:
        every_head, every_group = (Split(count, (((0, count),),) * ranks.size) for count in (head_count, group_count))
        return MixerHeads(every_head, every_group, widths, local=local)
    by_head, by_group = heads(head_count, group_count, ranks)
    mixer_heads = MixerHeads(by_head, by_group, widths, local=local, states=tuple(states))
    splits = {}
    for child, child_parts in parts.items():
        single = child_parts[0] if len(child_parts) == 1 else None
        if isinstance(single, str):
            head_split = by_group if single == "key" else by_head
            if lengths[child] % head_split.length:
                raise ValueError(
                    f"{lengths[child]} features of {child} are not those of {head_split.length} heads or groups"
                )
            splits[child] = head_split.scaled(lengths[child] // head_split.length)
            continue
        if sum(totals[part] for part in _flat(child_parts)) != lengths[child]:
            raise ValueError(f"{lengths[child]} features of {child} are not its parts, {shown(list(child_parts))}")
        splits[child] = packed([_split(part, mixer_heads) for part in child_parts])
    convolved = [split for split in splits.values() if split.length == vars(module).get(CONVOLVED_WIDTH)]
    splits |= {
        state: packed([_split(part, mixer_heads) for part in child_parts]) for state, child_parts in states.items()
    }
    return replace(mixer_heads, splits=splits, convolved=convolved[0] if convolved else None)


def _flat(parts: Parts) -> list[str]:
    return [name for part in parts for name in (part if isinstance(part, tuple) else (part,))]


def _split(part: str | tuple[str, ...], mixer_heads: MixerHeads) -> Split:
    """Split of the features of a part, or of a tuple of parts that are interleaved by group."""
    if part == "key":
        return mixer_heads.groups.scaled(mixer_heads.widths["key"])
    if isinstance(part, str):
        return mixer_heads.heads.scaled(mixer_heads.widths[part])
    per_group = mixer_heads.heads.length // mixer_heads.groups.length
    stored = sum(mixer_heads.widths[name] * (1 if name == "key" else per_group) for name in part)
    per_rank: list[tuple[Range, ...]] = []
    for own_heads, own_groups in zip(mixer_heads.heads.ranges, mixer_heads.groups.ranges, strict=True):
        ranges: list[Range] = []
        for group in (group for start, stop in own_groups for group in range(start, stop)):
            base, first = group * stored, group * per_group
            for name in part:
                width = mixer_heads.widths[name]
                if name == "key":
                    ranges.append((base, base + width))
                    base += width
                    continue
                for start, stop in own_heads:
                    low, high = max(start, first), min(stop, first + per_group)
                    if low < high:
                        ranges.append((base + (low - first) * width, base + (high - first) * width))
                base += per_group * width
        per_rank.append(tuple(ranges))
    return Split(mixer_heads.groups.length * stored, tuple(per_rank))
