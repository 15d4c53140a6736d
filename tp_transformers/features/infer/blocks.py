"""Blocks of linears, experts and embeddings that are sharded together, from the flow of features in a small model.

A linear can be sharded along its input features, and the linears that feed it along their output features, if every
output feature reaches only features that stay together: one feature (an MLP), or a head or KV group (attention).
Names decide only where gradients cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from transformers import PreTrainedModel

from ...anatomy import features, input_width, output_width
from ...strategies import STRATEGIES
from ...strategies.base import EXPERT_UNIT
from .attention import Roles, attention_roles, feature_order
from .block import KINDS, Block, Refused
from .mixers import mixer_block
from .reach import Flow
from .seen import fold_lists, stacked_experts

BIASES = ("alibi", "position_bias", "attention_mask")
"""Keyword arguments of attention that may be biases per head, which the strategy `alibi` slices."""


def find_blocks(small: PreTrainedModel, flow: Flow, model: PreTrainedModel) -> tuple[list[Block], dict[str, str]]:
    """Find the blocks of an architecture that can be sharded, and the reasons why others cannot.

    Args:
        small: a small model of it.
        flow: the flow of features in `small`.
        model: the full model on the meta device.
    """
    reasons: dict[str, str] = {}
    blocks = [*_linears(small, flow, reasons), *_experts(small, model, flow, reasons), *_vocabulary(model)]
    for name, module in small.named_modules():
        if features(module) is not None and fold_lists(small, name) not in flow.ran:
            reasons.setdefault(
                fold_lists(small, name), "it did not run on random tokens, so that nothing is known of it"
            )
    blocks = _apart(blocks, reasons)
    for block in list(blocks):
        read = {f"{block.name}.{child}" for child in block.roles.get("local", ())}  # by the mixer itself
        outside = flow.outside.intersection(block.rules) - read if block.kind != "experts" else None
        if outside:
            reasons.update(
                dict.fromkeys(block.rules, f"something else computes with the weights of {list_names(outside)}")
            )
            blocks.remove(block)
    return blocks, reasons


def _linears(model: PreTrainedModel, flow: Flow, reasons: dict[str, str]) -> list[Block]:
    """Attention and MLPs: linears with input features that can be sharded, and the linears that feed them."""
    modules = {fold_lists(model, name): module for name, module in model.named_modules()}
    params = {fold_lists(model, name): param for name, param in model.named_parameters()}
    blocks = []
    for consumer, (param, sources) in flow.unexamined.items():
        for name in (consumer, *sources):
            if flow.readers[name] <= {consumer} or name == consumer:
                reasons[name] = f"{param} is between them"
    for consumer in flow.mixed:
        try:
            mixer = mixer_block(consumer, flow, modules)
        except Refused as refused:
            reasons[consumer] = str(refused)
            continue
        blocks += [mixer] if mixer is not None else []
    for consumer, links in flow.links.items():
        if not links or any(link.is_dense for link in links.values()):
            inside = {name for name in links if not isinstance(modules[name], nn.Embedding)}
            if inside and all(flow.readers[name] == {consumer} for name in links):
                reasons.update(dict.fromkeys((consumer, *links), "all features meet between them, as in a norm of all"))
            continue
        if any(isinstance(modules[name], nn.Embedding) and not link.mixes.any() for name, link in links.items()):
            continue  # the residual stream before the first addition
        try:
            if any(link.mixes.any() for link in links.values()):
                blocks.append(_attention(consumer, flow, modules, params))
            elif all(flow.readers[name] == {consumer} for name in links):
                blocks.append(_mlp(consumer, flow, modules, params))
        except Refused as refused:
            for name in (consumer, *links):
                reasons.setdefault(name, str(refused))
    return blocks


def _attention(
    consumer: str, flow: Flow, modules: Mapping[str, nn.Module], params: Mapping[str, nn.Parameter]
) -> Block:
    embedded = {name for name in flow.links[consumer] if isinstance(modules[name], nn.Embedding)}
    roles: Roles = attention_roles(flow.links[consumer], embedded)
    owner = consumer.rpartition(".")[0]
    for name in roles.by_module:
        if name.rpartition(".")[0] != owner and name not in embedded:
            raise Refused(f"its projections are in several modules, {owner} and {name.rpartition('.')[0]}")
        if not flow.readers[name] <= {consumer} | roles.shared and name not in embedded:
            raise Refused(f"{name} feeds {list_names(flow.readers[name] - {consumer})} too")
    block = Block("attention", owner, heads=(roles.query, roles.kv), roles={"output": [_child(consumer)]})
    block.rules[consumer] = "rowwise"
    for name, role in roles.by_module.items():
        if role == "latent":
            block.rules[name] = "mla_kv_a_proj"
            continue
        block.roles.setdefault(role, []).append(_child(name))
        block.rules[name] = "colwise"
        if role == "fused":
            block.rules[name] = {"strategy": "packed_colwise", "parts": list(roles.parts)}
            block.remarks[name] = f"in a small model its features were all of {', then all of '.join(roles.parts)}"
        elif role == "interleaved":
            block.remarks[name] = "in a small model its features went KV group by KV group"
        elif role == "with_query":
            block.rules[name] = "local_colwise" if name in embedded else "colwise"
            block.remarks[name] = "it has something for every query head"
    for name in sorted(flow.between[consumer]):
        _between_heads(block, name, flow, modules, params, roles)
    biases = {key: shape for key, shape in flow.biased.get(owner, {}).items() if key in BIASES}
    if any(_has_heads(key, shape, roles.query) for key, shape in biases.items()):
        block.rules[owner] = "alibi"
        block.remarks[owner] = "it is given position biases of all heads"
    block.roles = {role: block.roles[role] for role in sorted(block.roles, key=_ROLE_ORDER.index)}
    return block


_ROLE_ORDER = ["query", "fused", "interleaved", "key", "key_value", "value", "output", "with_query", "with_key"]


def _has_heads(key: str, shape: tuple[int, ...], heads: int) -> bool:
    """True if an argument of attention has values for every head."""
    if key == "alibi":
        return True
    if key == "position_bias":
        return len(shape) == 3 and shape[0] % heads == 0
    return len(shape) == 4 and shape[1] == heads > 1


def _between_heads(
    block: Block,
    name: str,
    flow: Flow,
    modules: Mapping[str, nn.Module],
    params: Mapping[str, nn.Parameter],
    roles: Roles,
) -> None:
    """Add the rule of a parameter between the projections of attention. Raises Refused if no rule fits."""
    shape, owner = tuple(params[name].shape), name.rpartition(".")[0]
    source = flow.norms.get(owner)
    role = roles.by_module.get(source, "") if source is not None else ""
    if owner == block.name and shape == (roles.query,):
        block.rules[name] = "local_colwise"
        block.roles.setdefault("with_query", []).append(_child(name))
        block.remarks[name] = "it has a number for every query head"
        return
    if source is not None and role in ("query", "key", "value"):
        width = output_width(modules[source])
        count = roles.query if role == "query" else roles.kv
        if shape == (width // count,):
            block.rules[owner] = "replicated_with_grad_allreduce"
            return
        rule = ""
        if shape == (count, width // count):
            rule = "local_colwise"
        elif shape == (width,) and count > 1:
            rule = "sharded_norm"
            try:
                STRATEGIES["sharded_norm"].bind(modules[owner], 2).check(modules[owner])
            except ValueError as error:
                raise Refused(str(error)) from None
            block.remarks[owner] = "it norms all heads at once"
        if rule:
            block.rules[owner] = rule
            block.roles.setdefault("with_query" if role == "query" else "with_key", []).append(_child(owner))
            return
    if len(shape) == 1 and shape[0] not in (roles.query, roles.kv) and shape[0] <= roles.head_dim:
        block.rules[owner] = "replicated_with_grad_allreduce"
        return
    raise Refused(f"{name} of {list(shape)} is between its projections, and nothing is known of it")


def _mlp(consumer: str, flow: Flow, modules: Mapping[str, nn.Module], params: Mapping[str, nn.Parameter]) -> Block:
    width = input_width(modules[consumer])
    block = Block("mlp", consumer.rpartition(".")[0], rules={consumer: "rowwise"})
    for name, link in flow.links[consumer].items():
        if bool((link.reaches.sum(1) > 1).any()):
            raise Refused(f"a feature of {name} reaches several of {consumer}")
        made = [int(row.int().argmax()) if row.any() else None for row in link.reaches]
        _add_rule(block, name, "colwise", feature_order(made, width))
    for name in flow.between[consumer]:
        if params[name].numel() > 1:
            raise Refused(f"{name} comes before {consumer}, and nothing is known of it")
        block.rules[name.rpartition(".")[0]] = "replicated_with_grad_allreduce"
    if ".experts.*" in f"{block.name}.":
        block.remarks[consumer] = "right, but one all-reduce an expert"
    return block


def _experts(model: PreTrainedModel, meta: PreTrainedModel, flow: Flow, reasons: dict[str, str]) -> list[Block]:
    """Merged experts: every expert is sharded."""
    blocks = []
    shapes = {fold_lists(model, name): param for name, param in model.named_parameters()}
    modules = {fold_lists(meta, name): module for name, module in meta.named_modules()}
    for name, feeds in flow.experts.items():
        if not feeds:
            reasons[name] = "which features of its parameters belong together was not seen"
            continue
        block = Block("experts", name, rules={name: "moe_tp_experts"})
        stacked = stacked_experts(modules[name])
        if stacked:
            _stack(block, stacked, modules[name])
            blocks.append(block)
            continue
        for param_name in [_child(full) for full in shapes if full.rpartition(".")[0] == name]:
            full = f"{name}.{param_name}"
            if param_name in feeds:
                dim, made, width = feeds[param_name].dim, feeds[param_name].features, feeds[param_name].width
                family = "colwise" if dim == shapes[full].ndim - 2 and shapes[full].ndim == 3 else "rowwise"
                _add_rule(block, full, family, feature_order(made, width), EXPERT_UNIT)
            else:
                block.rules[full] = "replicate_once"
                block.remarks[full] = "a bias that is added to the output"
        blocks.append(block)
    return blocks


def _stack(block: Block, count: int, module: nn.Module) -> None:
    """Add the rules of experts stacked as (experts * features, hidden)."""
    widths: set[str] = set()
    for param_name, param in module.named_parameters():
        name = f"{block.name}.{param_name}"
        block.rules[name] = {"strategy": "local_packed_colwise", "parts": count}
        block.remarks[name] = "one part an expert of this config, one below the other"
        widths |= {
            key for key, value in vars(module).items() if value == param.shape[0] // count and type(value) is int
        }
    if widths:
        block.rules[block.name] = {"strategy": "moe_tp_experts", "widths": sorted(widths)}
        block.remarks[block.name] = "its forward is taken to view its parameters by such widths"


def _add_rule(block: Block, name: str, family: str, ordering: tuple[str, int], unit: int = 1) -> None:
    """Add the rule of features in the order `ordering`; at least `unit` consecutive features stay together."""
    order, parts = ordering
    if parts == 1:
        block.rules[name] = family
    elif order == "alternating":
        block.rules[name] = {"strategy": family, "unit": parts * unit}
        block.remarks[name] = f"in a small model {parts} features in a row met"
    else:
        block.rules[name] = {"strategy": f"packed_{family}", "parts": parts}
        block.remarks[name] = f"in a small model it was {parts} parts, one after the other"


def _vocabulary(model: PreTrainedModel) -> list[Block]:
    """The embedding, other embeddings of the same size, and the head, all sharded along the vocabulary."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding):
        return []
    block = Block("vocabulary", "")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == embedding.num_embeddings:
            block.rules[fold_lists(model, name)] = "embedding_rowwise"
        elif module is head and features(module) is not None:
            block.rules[fold_lists(model, name)] = "colwise_rep"
    return [block]


def _apart(blocks: Iterable[Block], reasons: dict[str, str]) -> list[Block]:
    """Keep blocks without common rules; earlier KINDS have precedence."""
    kept: list[Block] = []
    taken: set[str] = set()
    for block in sorted(blocks, key=lambda block: KINDS.index(block.kind)):
        clash = taken.intersection(block.rules)
        if clash:
            reasons.update(
                {name: f"{list_names(clash)} would be sharded in two ways" for name in block.rules.keys() - taken}
            )
            continue
        taken |= block.rules.keys()
        kept.append(block)
    return kept


def _child(name: str) -> str:
    return name.rpartition(".")[2]


def list_names(names: Iterable[str]) -> str:
    """Sorted names for a message; the empty name is the model's output."""
    return ", ".join(name or "the output" for name in sorted(names))
