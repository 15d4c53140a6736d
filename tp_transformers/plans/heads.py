"""Attention: its projections, and the split of their heads, which keeps KV groups complete."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..anatomy import (
    HEAD_SIZES,
    attention_config,
    features,
    first_of,
    fold_layers,
    head_counts,
    inner,
    input_width,
    is_attention,
    is_inside,
    output_width,
)
from ..errors import hint_for
from ..slices.layout import Split, heads, interleaved, packed
from ..strategies.signature import FEATURES
from .attention import AttentionHeads
from .binding import Binding
from .rule import UNRULED, Rule

PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "output": ("o_proj", "out_proj", "dense"),
    "with_query": ("sinks",),
}
LATENT_PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "query": ("q_b_proj", "q_proj"),
    "key_value": ("kv_b_proj",),
    "output": ("o_proj",),
}
"""Children that identify attention if a plan does not name it (a dict, a declared plan)."""
Roles = dict[str, list[str]]
"""Role -> full names of its children."""
_ABSENT = ({"value"}, {"key", "value"})
"""Roles that attention may lack: its values are its keys, or keys and values are those of another layer."""


def split_attention(bound: Binding) -> dict[str, AttentionHeads]:
    """Split the heads of every attention module with sharded projections; see `Feature.split_heads`.

    If the plan, or the plan of an inner model, has no attention modules, they are recognised by PROJECTIONS. Rules that
    a declared plan lacks are added.
    """
    faults = bound.faults
    fault_count, size = len(faults), bound.size
    heads_by_module: dict[str, AttentionHeads] = {}
    for name, (around, children, blocks) in _groups(bound).items():
        roles = {role: [f"{around}.{child}" for child in names] for role, names in children.items()}
        counts = _count_heads(name, roles, bound) if _stays_sharded(name, roles, bound) else None
        if counts is None:
            continue
        query, kv, head_dim, repeats = counts
        count = max(blocks.values(), default=1)
        if query % count or kv % count:
            faults.append(f"attention {name}: {query} query and {kv} key/value heads are not those of {count} blocks")
            continue
        if bound.plan.declared and not _is_described(name, bound):
            _complete_declared(name, roles, query, head_dim, bound)
        followers = [child for names in roles.values() for child in names]
        if size > query // count:
            bound.replicated.update(dict.fromkeys((*followers, name), name))
            continue
        block_splits, hidden = heads(query // count, kv // count, bound.ranks), roles.pop("with_hidden", [])
        holders = dict.fromkeys(child.rpartition(".")[0] for child, _ in _projections(roles))
        heads_by_module[name] = AttentionHeads(
            packed([block_splits[0]] * count),
            packed([block_splits[1]] * count),
            is_fused=bool({"fused", "interleaved"} & roles.keys()),
            is_latent="key_value" in roles,
            head_dim=head_dim,
            holders=tuple(holder for holder in holders if is_inside(holder, name)),
            hidden=tuple(hidden),
            repeats=repeats,
        )
        bound.splits[name] = heads_by_module[name].query
        _split_children(roles, block_splits, blocks, bound)
    if len(faults) == fault_count:  # faults in the description of attention are reported alone
        faults.extend(_unrecognised(bound))
    return heads_by_module


def _stays_sharded(name: str, roles: Roles, bound: Binding) -> bool:
    """True if every projection of an attention module is sharded; adds a fault if only some are."""
    projections = dict(_projections(roles))
    sharded = {child for child, role in projections.items() if _is_sharded(role, bound.module_rules.get(child))}
    if 0 < len(sharded) < len(projections):
        bound.faults.append(
            f"attention {fold_layers(name)}: {_own_names(sharded)} leave their features sharded, "
            f"{_own_names(projections.keys() - sharded)} do not; make all of query, key and value colwise and the "
            "output rowwise, or none"
        )
    return len(sharded) == len(projections)


def _projections(roles: Roles) -> Iterator[tuple[str, str]]:
    """(projection, role) pairs of one attention module."""
    return ((child, role) for role, names in roles.items() for child in names if not role.startswith("with_"))


def _complete_declared(name: str, roles: Roles, count: int, head_dim: int | None, bound: Binding) -> None:
    """Complete a declared plan: roles of gates and biases per query head, rules of norms within heads."""
    modules, module_rules = bound.modules, bound.module_rules
    known = {child for names in roles.values() for child in names}
    for child, rule in bound.param_rules.items():
        owner, _, param_type = child.rpartition(".")
        if owner == name and child not in known and rule.strategy_name != "replicate":
            shape = getattr(modules[name], param_type).shape
            if {count, count * (head_dim or 1)}.intersection(shape):
                roles.setdefault("with_query", []).append(child)
    for child, module in modules.items():
        if child.rpartition(".")[0] != name or child in known:
            continue
        feature_counts = features(module)
        if child in module_rules and feature_counts is not None and _is_sharded("query", module_rules[child]):
            if head_dim is not None and feature_counts[1] in (count, count * head_dim):
                roles.setdefault("with_query", []).append(child)
        elif child not in module_rules and head_dim is not None:
            shapes = [tuple(param.shape) for param in module.parameters()]
            if shapes and set(shapes) == {(head_dim,)}:
                module_rules[child] = Rule(child, "replicated_with_grad_allreduce")


def _split_children(roles: Roles, block_splits: tuple[Split, Split], blocks: Mapping[str, int], bound: Binding) -> None:
    """Split the children of one attention module by its heads; children without rules are skipped."""
    for child, role in ((child, role) for role, names in roles.items() for child in names):
        rule = bound.module_rules.get(child) or bound.param_rules.get(child)
        if rule is None:
            continue
        bound.splits[child] = packed([_role_split(role, block_splits, rule)] * blocks.get(role, 1))
        if rule.parts is not None and role != "fused":
            bound.faults.append(
                f"{fold_layers(child)}: attention splits it by heads, as {role}, which has no parts; leave parts out, "
                "or make its role in the plan's attention fused"
            )


def _role_split(role: str, block_splits: tuple[Split, Split], rule: Rule) -> Split:
    """Split, in heads, of one block of the child with `role`; `block_splits`: of the block's query and KV heads."""
    query, kv = block_splits
    by_part = {"query": query, "key": kv, "value": kv}
    if role == "fused":
        parts = rule.parts if isinstance(rule.parts, tuple) else tuple(by_part)
        return packed([by_part.get(str(part), kv) for part in parts])
    if role == "interleaved":
        return interleaved(query, kv)
    return kv if role in ("key", "value", "key_value", "with_key") else query


def _unrecognised(bound: Binding) -> Iterator[str]:
    """Faults: attention that is sharded without a description of its heads, unless evenly and into complete heads."""
    modules, size, is_even = bound.modules, bound.size, bound.ranks.shares is None
    known = bound.splits.keys() | bound.replicated.keys()
    for child, rule in bound.module_rules.items():
        name = child.rpartition(".")[0]
        if not is_attention(modules[name]) or child in known or not _is_sharded("query", rule):
            continue
        common = math.gcd(*head_counts(modules[name], attention_config(modules[name], bound.model)))
        if common % size or not is_even:
            valid = [str(count) for count in range(1, common + 1) if common % count == 0]
            wanted = f"for {size}" if is_even else f"by shares of {size}"
            yield (
                f"attention {fold_layers(name)}: the plan does not say where the heads of {child.rpartition('.')[2]} "
                f"are, so they can be split for {' or '.join(valid)} ranks, not {wanted}; name its projections in a "
                "YAML plan's attention section"
            )


def _is_described(name: str, bound: Binding) -> bool:
    """True if the plan of the inner model (else the full model) around the module `name` has attention entries."""
    around = bound.plan.inner_model_around
    return around(name) in (around(entry.full(bound.prefix)) for entry in bound.plan.attention)


def _groups(bound: Binding) -> dict[str, tuple[str, Mapping[str, tuple[str, ...]], Mapping[str, int]]]:
    """Attention module -> (it or a module around it, that module's children and blocks by role).

    From the attention entries of plans, or else from PROJECTIONS.
    """
    prefix, modules, faults = bound.prefix, bound.modules, bound.faults
    groups: dict[str, tuple[str, Mapping[str, tuple[str, ...]], Mapping[str, int]]] = {}
    for name, module in modules.items():
        for projections in () if _is_described(name, bound) else (PROJECTIONS, LATENT_PROJECTIONS):
            children = dict(_present(module, projections))
            lacking = projections.keys() - children.keys() - {"with_query"}
            if not lacking or (lacking in _ABSENT and is_attention(module) and not _has_others(module, children)):
                groups[name] = name, children, {}
    for group in bound.plan.attention:
        names = list(group.match(modules, prefix))
        if not names and not group.optional:
            hint = hint_for(faults, group.full(prefix), map(fold_layers, modules))
            faults.append(f"attention {group.full(prefix)}: matches no module{hint}")
        for name in names:
            children = dict(_present(modules[name], group.children))
            absent = [role for role in group.children if role not in children and not role.startswith("with_")]
            if group.optional and (absent or not children):  # Nemotron-H: mixers of all kinds have one name
                continue
            faults.extend(
                f"attention {name}: it has no child {' or '.join(map(repr, group.children[role]))}" for role in absent
            )
            if not absent:
                # The module that holds query, key and value projections; BERT's output projection is outside it.
                input_projections = [child for role in children.keys() - {"output"} for child in children[role]]
                holders = {child.rpartition(".")[0] for child in input_projections}
                attention_name = ".".join(filter(None, (name, *holders))) if len(holders) == 1 else name
                groups[attention_name] = name, children, group.blocks
    return groups


def _present(module: nn.Module, children: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (role, names) of the children that the module has: the first of a projection, all of a `with_` role."""
    for role, names in children.items():
        present = tuple(name for name in names if isinstance(inner(module, name), nn.Module | nn.Parameter))
        if present:
            yield role, present if role.startswith("with_") else present[:1]


def _has_others(module: nn.Module, children: Mapping[str, tuple[str, ...]]) -> bool:
    """True if an attention module has linears besides `children`, perhaps keys and values by other names."""
    known = {name for names in children.values() for name in names}
    return any(features(child) is not None and name not in known for name, child in module.named_children())


def _is_sharded(role: str, rule: Rule | None) -> bool:
    """True if a projection leaves its output sharded or, for the output projection, takes a sharded input."""
    strategy = (rule.instance if rule is not None else None) or UNRULED
    signature = strategy.signature
    return signature.takes is FEATURES if role == "output" else signature.leaves is FEATURES


def _count_heads(name: str, roles: Roles, bound: Binding) -> tuple[int, int, int | None, int] | None:
    """(query heads, KV heads, head size, times that each query head attends) of one attention module.

    None, and a fault, if the counts are inconsistent.
    """
    modules, module, faults = bound.modules, bound.modules[name], bound.faults
    config = attention_config(module, bound.model)
    head_dim = first_of(HEAD_SIZES, module, config)
    config_heads, kv = head_counts(module, config)
    query, repeats = config_heads, 1
    attended = input_width(modules[roles["output"][0]]) if "output" in roles else 0
    if head_dim is None and query and attended % query == 0:
        head_dim = attended // query or None
    query_width = output_width(modules[roles["query"][0]]) if {"query", "fused"} <= roles.keys() else 0
    if head_dim is not None and query_width and query_width % head_dim == 0:
        query = query_width // head_dim  # JetMoE: the heads of one expert, which attend once per expert of a token
        repeats = config_heads // query if config_heads % query == 0 else 1
    if "key_value" in roles:  # latent attention: one key and value per query head
        kv = query
    groups = first_of(("num_key_value_groups",), module)
    if groups and not roles.keys() & {"key", "key_value", "fused", "interleaved"}:  # keys of another layer
        kv = query // groups
    if head_dim is not None and "key" in roles:
        for role in ("query", "key"):
            child = roles[role][0]
            width = output_width(modules[child])
            if not width or width % head_dim:
                faults.append(f"{child}: its {width} features are not complete heads of {head_dim}")
                return None
            query, kv = (width // head_dim, kv) if role == "query" else (query, width // head_dim)
        if config_heads and query > config_heads and query % config_heads == 0 and attended == config_heads * head_dim:
            query = config_heads  # the projection also makes a gate per query head
    if not query or not kv or query % kv:
        faults.append(f"attention {name}: {query} query heads are not a multiple of {kv} key/value heads")
        return None
    return query, kv, head_dim, max(repeats, 1)


def _own_names(children: Any) -> str:
    return ", ".join(sorted(child.rpartition(".")[2] for child in children))
