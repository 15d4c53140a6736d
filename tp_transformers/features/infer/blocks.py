"""Blocks of linears, experts and embeddings that are sharded together, from the flow of features in a small model.

A linear can be sharded along its input features, and the linears that feed it along their output features, if every
output feature reaches only features that stay together: one feature (an MLP), or a head or KV group (attention).
Names decide only where gradients cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
    finder = _Finder(small, flow)
    reasons = finder.reasons
    blocks = [*finder.linears(), *finder.experts(model), *_vocabulary(model)]
    for name, module in finder.modules.items():
        if features(module) is not None and name not in flow.ran:
            reasons.setdefault(name, "it did not run on random tokens, so that nothing is known of it")
    blocks = _apart(blocks, reasons)
    for block in list(blocks):
        read = {f"{block.name}.{child}" for child in block.roles.get("local", ())}  # by the mixer itself
        outside = flow.outside.intersection(block.rules) - read if block.kind != "experts" else None
        if outside:
            why = f"something else computes with the weights of {list_names(outside)}"
            reasons.update(dict.fromkeys(block.rules, why))
            blocks.remove(block)
    return blocks, reasons


class _Finder:
    """A small model by folded names of modules and parameters, its flow, and the reasons of what is replicated."""

    def __init__(self, small: PreTrainedModel, flow: Flow) -> None:
        self.flow = flow
        self.modules = {fold_lists(small, name): module for name, module in small.named_modules()}
        self.params = {fold_lists(small, name): param for name, param in small.named_parameters()}
        self.reasons: dict[str, str] = {}

    def linears(self) -> Iterator[Block]:
        """Attention and MLPs: linears with input features that can be sharded, and the linears that feed them."""
        flow, modules, reasons = self.flow, self.modules, self.reasons
        for consumer, (param, sources) in flow.unexamined.items():
            for name in (consumer, *sources):
                if flow.readers[name] <= {consumer} or name == consumer:
                    reasons[name] = f"{param} is between them"
        for consumer in flow.mixed:
            try:
                mixer = mixer_block(consumer, flow, modules)
            except Refused as refused:
                reasons[consumer] = str(refused)
            else:
                yield from [mixer] if mixer is not None else []
        for consumer, links in flow.links.items():
            is_only_reader = all(flow.readers[name] == {consumer} for name in links)
            embeddings = [name for name in links if isinstance(modules[name], nn.Embedding)]
            if not links or any(link.is_dense for link in links.values()):
                if is_only_reader and len(embeddings) < len(links):
                    why = "all features meet between them, as in a norm of all"
                    reasons.update(dict.fromkeys((consumer, *links), why))
                continue
            if not all(links[name].mixes.any() for name in embeddings):
                continue  # the residual stream before the first addition
            try:
                if any(link.mixes.any() for link in links.values()):
                    yield self._attention(consumer)
                elif is_only_reader:
                    yield self._mlp(consumer)
            except Refused as refused:
                for name in (consumer, *links):
                    reasons.setdefault(name, str(refused))

    def _attention(self, consumer: str) -> Block:
        flow = self.flow
        embedded = {name for name in flow.links[consumer] if isinstance(self.modules[name], nn.Embedding)}
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
            self._between_heads(block, name, roles)
        biases = {key: shape for key, shape in flow.biased.get(owner, {}).items() if key in BIASES}
        if any(_has_heads(key, shape, roles.query) for key, shape in biases.items()):
            block.rules[owner] = "alibi"
            block.remarks[owner] = "it is given position biases of all heads"
        block.roles = {role: block.roles[role] for role in sorted(block.roles, key=_ROLE_ORDER.index)}
        return block

    def _between_heads(self, block: Block, name: str, roles: Roles) -> None:
        """Add the rule of a parameter between the projections of attention. Raises Refused if no rule fits."""
        shape, owner = tuple(self.params[name].shape), name.rpartition(".")[0]
        source = self.flow.norms.get(owner, "")
        role = roles.by_module.get(source, "")
        if owner == block.name and shape == (roles.query,):
            block.rules[name] = "local_colwise"
            block.roles.setdefault("with_query", []).append(_child(name))
            block.remarks[name] = "it has a number for every query head"
            return
        if role in ("query", "key", "value"):
            width, count = output_width(self.modules[source]), roles.query if role == "query" else roles.kv
            if shape == (width // count,):
                block.rules[owner] = "replicated_with_grad_allreduce"
                return
            rule = ""
            if shape == (count, width // count):
                rule = "local_colwise"
            elif shape == (width,) and count > 1:
                rule = "sharded_norm"
                try:
                    STRATEGIES["sharded_norm"].bind(self.modules[owner], 2).check(self.modules[owner])
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

    def _mlp(self, consumer: str) -> Block:
        width = input_width(self.modules[consumer])
        block = Block("mlp", consumer.rpartition(".")[0], rules={consumer: "rowwise"})
        for name, link in self.flow.links[consumer].items():
            if bool((link.reaches.sum(1) > 1).any()):
                raise Refused(f"a feature of {name} reaches several of {consumer}")
            made = [int(row.int().argmax()) if row.any() else None for row in link.reaches]
            _add_rule(block, name, "colwise", feature_order(made, width))
        for name in self.flow.between[consumer]:
            if self.params[name].numel() > 1:
                raise Refused(f"{name} comes before {consumer}, and nothing is known of it")
            block.rules[name.rpartition(".")[0]] = "replicated_with_grad_allreduce"
        if ".experts.*" in f"{block.name}.":
            block.remarks[consumer] = "right, but one all-reduce an expert"
        return block

    def experts(self, meta: PreTrainedModel) -> Iterator[Block]:
        """Merged experts: every expert is sharded. `meta`: the full model."""
        modules = {fold_lists(meta, name): module for name, module in meta.named_modules()}
        for name, feeds in self.flow.experts.items():
            if not feeds:
                self.reasons[name] = "which features of its parameters belong together was not seen"
                continue
            block = Block("experts", name, rules={name: "moe_tp_experts"})
            stacked = stacked_experts(modules[name])
            if stacked:
                _stack(block, stacked, modules[name])
            for full in [] if stacked else [full for full in self.params if full.rpartition(".")[0] == name]:
                feed, ndim = feeds.get(_child(full)), self.params[full].ndim
                if feed is None:
                    block.rules[full] = "replicate_once"
                    block.remarks[full] = "a bias that is added to the output"
                else:
                    family = "colwise" if feed.dim == ndim - 2 and ndim == 3 else "rowwise"
                    _add_rule(block, full, family, feature_order(feed.features, feed.width), EXPERT_UNIT)
            yield block


_ROLE_ORDER = ["query", "fused", "interleaved", "key", "key_value", "value", "output", "with_query", "with_key"]


def _has_heads(key: str, shape: tuple[int, ...], heads: int) -> bool:
    """True if an argument of attention has values for every head."""
    if key == "alibi":
        return True
    if key == "position_bias":
        return len(shape) == 3 and shape[0] % heads == 0
    return len(shape) == 4 and shape[1] == heads > 1


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
