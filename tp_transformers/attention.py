"""Attention: which projections belong together, and how their heads are cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from .errors import nearest
from .layout import Split, heads, packed
from .plan import Plan, Rule, fold_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
"""The children by which attention is recognised where a plan does not name it (a dict, a declared plan)."""


@dataclass(frozen=True)
class AttentionHeads:
    """How the heads of one attention module are cut."""

    head_dim: int
    query: Split
    kv: Split

    def attributes(self, rank: int) -> dict[str, int]:
        """The module's head counts on `rank`, by the names that transformers uses."""
        query, kv = self.query.local_length(rank), self.kv.local_length(rank)
        return {"num_heads": query, "num_key_value_heads": kv, "num_key_value_groups": query // kv}

    def features(self, role: str) -> Split:
        """How the features of the projection in `role` are cut."""
        return (self.kv if role in ("key", "value") else self.query).scaled(self.head_dim)


@dataclass
class AttentionCut:
    """How all attention of a model is cut."""

    heads: dict[str, AttentionHeads] = field(default_factory=dict)
    """Attention module -> its heads."""
    splits: dict[str, Split] = field(default_factory=dict)
    """Projection module -> how its features are cut."""
    whole: dict[str, str] = field(default_factory=dict)
    """Projection module that every rank holds whole, since there are more ranks than query heads -> its attention."""


def cut_attention(
    plan: Plan, model: PreTrainedModel, module_rules: Mapping[str, Rule], prefix: str, size: int, faults: list[str]
) -> AttentionCut:
    """Cut every attention module whose projections stay sharded by whole heads.

    Args:
        plan: names the attention modules; where it names none, they are recognised by PROJECTIONS.
        model: a transformers model.
        module_rules: the rule of every module that has one.
        prefix: the base model's name in the full model.
        size: number of ranks.
        faults: what is wrong is added to it.
    """
    modules = dict(model.named_modules())
    cut = AttentionCut()
    for name, children in _groups(plan, modules, prefix, faults).items():
        roles = {role: f"{name}.{child}" for role, child in children.items()}
        sharded = {role for role, child in roles.items() if _is_sharded(role, module_rules.get(child))}
        if sharded != set(roles):
            if sharded:
                faults.append(
                    f"attention {fold_layers(name)}: {', '.join(children[role] for role in sorted(sharded))} leave "
                    f"their features sharded, {', '.join(children[role] for role in sorted(set(roles) - sharded))} do "
                    "not; make all of query, key and value colwise and the output rowwise, or none"
                )
            continue
        counts = _count_heads(name, roles, modules, model, faults)
        if counts is None:
            continue
        head_dim, query, kv = counts
        if size > query:
            cut.whole.update(dict.fromkeys(roles.values(), name))
            continue
        group = cut.heads[name] = AttentionHeads(head_dim, *heads(query, kv, size))
        for role, child in roles.items():
            if role == "fused":
                parts = module_rules[child].parts
                names = parts if isinstance(parts, tuple) else ("query", "key", "value")
                cut.splits[child] = packed([group.features(str(part)) for part in names])
            else:
                cut.splits[child] = group.features(role)
    _refuse_unrecognised(modules, model, module_rules, cut, size, faults)
    return cut


def _refuse_unrecognised(
    modules: Mapping[str, nn.Module],
    model: PreTrainedModel,
    module_rules: Mapping[str, Rule],
    cut: AttentionCut,
    size: int,
    faults: list[str],
) -> None:
    """Attention whose projections are cut, though nothing says where its heads are: right only if all counts divide."""
    known = cut.splits.keys() | cut.whole.keys()
    for child, rule in module_rules.items():
        name = child.rpartition(".")[0]
        if "Attention" not in type(modules[name]).__name__ or child in known or not _is_sharded("query", rule):
            continue
        common = math.gcd(*_config_heads(_config(modules[name], model)))
        if common % size:
            valid = [str(count) for count in range(1, common + 1) if common % count == 0]
            faults.append(
                f"attention {fold_layers(name)}: the plan does not say where the heads of {child.rpartition('.')[2]} "
                f"are, so they can be cut for {' or '.join(valid)} ranks, not for {size}; name its projections in a "
                "YAML plan's attention section"
            )


def _groups(
    plan: Plan, modules: Mapping[str, nn.Module], prefix: str, faults: list[str]
) -> dict[str, Mapping[str, str]]:
    """Attention modules -> their children by role: those that the plan names, or those that look like it."""
    if not plan.attention:
        children = PROJECTIONS.values()
        return {name: PROJECTIONS for name in modules if all(f"{name}.{child}" in modules for child in children)}
    groups: dict[str, Mapping[str, str]] = {}
    for group in plan.attention:
        names = list(group.match(modules, prefix))
        if not names:
            pattern = group.full(prefix)
            faults.append(f"attention {pattern}: matches no module{nearest(pattern, map(fold_layers, modules))}")
        for name in names:
            absent = [child for child in group.children.values() if f"{name}.{child}" not in modules]
            faults.extend(f"attention {name}: it has no child {child!r}" for child in absent)
            if not absent:
                groups[name] = group.children
    return groups


def _is_sharded(role: str, rule: Rule | None) -> bool:
    """Whether the features of a projection stay, or arrive, sharded over the ranks."""
    strategy = rule.instance if rule is not None else None
    if strategy is None:
        return False
    return strategy.takes_sharded_input if role == "output" else strategy.leaves_sharded_output


def _count_heads(
    name: str,
    roles: Mapping[str, str],
    modules: Mapping[str, nn.Module],
    model: PreTrainedModel,
    faults: list[str],
) -> tuple[int, int, int] | None:
    """(head size, query heads, KV heads) of one attention module; None, and a fault, where they do not add up."""
    module = modules[name]
    config = _config(module, model)
    sizes = [getattr(owner, "head_dim", None) for owner in (module, config)]
    head_dim = next((size for size in sizes if isinstance(size, int)), None)
    if head_dim is None:
        faults.append(f"attention {name}: neither it nor its config has head_dim")
        return None
    query, kv = _config_heads(config)
    widths = {role: int(modules[child].weight.shape[0]) for role, child in roles.items() if role in ("query", "key")}  # type: ignore[arg-type,union-attr,index]
    for role, width in widths.items():
        if width % head_dim:
            faults.append(f"{roles[role]}: its {width} features are not whole heads of {head_dim}")
            return None
    query = widths["query"] // head_dim if "query" in widths else query
    kv = widths["key"] // head_dim if "key" in widths else kv
    if not query or not kv or query % kv:
        faults.append(f"attention {name}: {query} query heads are not a multiple of {kv} key/value heads")
        return None
    return head_dim, query, kv


def _config(module: nn.Module, model: PreTrainedModel) -> Any:
    """The config that counts for an attention module."""
    return getattr(module, "config", None) or model.config.get_text_config()


def _config_heads(config: Any) -> tuple[int, int]:
    """(query heads, KV heads) by a config; 0 where it does not say."""
    query = int(getattr(config, "num_attention_heads", 0) or 0)
    return query, int(getattr(config, "num_key_value_heads", 0) or query)
