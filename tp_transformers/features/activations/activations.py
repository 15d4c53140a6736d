"""Full activations of modules between sharded linears, for hooks and tools that read or edit them.

    full_activation(q_proj, x)     [x of rank 0 | x of rank 1] on every rank; backward: own features
    local_activation(q_proj, x)    own features; backward: [gradient of rank 0 | gradient of rank 1]

Gradients are those of one process, also of KV heads that several ranks have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...anatomy import HEADS, is_cross_attention
from ...errors import UnsupportedError
from ...marks import untyped
from ...model.dropout import layer_strategy
from ...plans.attention import AttentionHeads
from ...ranks.collectives import Group, copy_to_region, gather_from_region
from ...ranks.group import TensorParallelGroup
from ...slices.layout import Layout, Split
from ...strategies.forward.communication import Communication
from ...strategies.shards.slicing import take
from ...strategies.signature import ANY, FEATURES, REPLICATED
from ...torch_api import tree_map_only

Side = Literal["input", "output"]


def full_activation(module: nn.Module, x: Tensor, side: Side = "output") -> Tensor:
    """All features of `x: (..., features)`, an input or output of `module` on this rank. Collective over `tp`.

    `module` may be PEFT's layer around a sharded linear. Returns `x` itself if every rank has all features. The
    backward keeps this rank's gradient.

    Raises UnsupportedError if ranks have other shards than of features: of the sequence, of heads, of the batch, or
    partial sums. Raises ValueError if `x` has another width than this rank's shard.
    """
    split, strategy = features_split(module, side), layer_strategy(module)
    return x if split is None or strategy is None else gather_features(x, split, strategy)


def local_activation(module: nn.Module, x: Tensor, side: Side = "output") -> Tensor:
    """This rank's features of `x: (..., all features)`, the reverse of `full_activation`. Its backward is collective.

    Raises UnsupportedError as `full_activation` does, and ValueError if `x` has not all features.
    """
    split, strategy = features_split(module, side), layer_strategy(module)
    return x if split is None or strategy is None else own_features(x, split, strategy)


def gather_features(x: Tensor, split: Split, strategy: Communication) -> Tensor:
    """All features of `x`, over the ranks of `strategy`; see `full_activation`."""
    _check_width(x, split.widths[strategy.rank])
    return _gather(x, split, strategy.group_of(), dim=-1)


def own_features(x: Tensor, split: Split, strategy: Communication) -> Tensor:
    """This rank's features of `x`; see `local_activation`."""
    _check_width(x, split.length)
    copied = copy_to_region(x, strategy.group_of())  # adds up gradients of KV heads that several ranks have
    own: Tensor = take(copied, Layout(x.ndim - 1, split), strategy.rank)
    return own.clone()  # not a view, which a hook could not change in place


def features_split(module: nn.Module, side: Side) -> Split | None:
    """Split of the features of a module's "input" or "output" over the ranks; None if every rank has all.

    Raises UnsupportedError if ranks have other shards than of features.
    """
    strategy = layer_strategy(module)
    if strategy is None:
        return None
    state = strategy.signature.takes if side == "input" else strategy.signature.leaves
    split = strategy.sharded_input if side == "input" else strategy.sharded_output
    if state in (ANY, REPLICATED) or (state is FEATURES and split is not None):
        return split
    raise UnsupportedError(
        f"the {side} of {strategy.name}",
        got=f"a tensor that is {state.value} over the ranks: heads, tokens or partial sums",
        expected="shards of the last dim, or equal tensors",
        fix="Read the output of the linear before it, or the input of the one after it.",
    )


def _check_width(x: Tensor, width: int) -> None:
    if x.shape[-1] != width:
        raise ValueError(f"activations of {x.shape[-1]} features, not of {width}: gathered twice, or of another module")


def _gather(x: Tensor, split: Split, group: Group, *, dim: int) -> Tensor:
    """All-gather the shards of `dim`, in the order of the full dim; each shared KV head comes from one of its ranks.

    The backward keeps this rank's slice of the gradient, with zeros for what came from another rank.
    """
    gathered = gather_from_region(x, split.widths, group, dim=dim)
    return torch.cat([gathered.narrow(dim, start, stop - start) for start, stop in split.gathered_ranges], dim)


FIELDS = {"attentions": False, "cross_attentions": True}
"""Attention fields in the output of a stack of layers -> True for cross-attention."""


def return_full_attentions(
    model: nn.Module, attention: Mapping[str, AttentionHeads], group: TensorParallelGroup
) -> None:
    """Gather the heads of all ranks in the attentions that a stack of layers returns, (..., heads, queries, keys).

    In the stack and not in its layers: eager attention always computes its weights, even if they are not returned.

    `attention`: attention module -> its sharded heads. A stack is a transformers model that holds attention itself.
    """
    if group.process_group is None:
        return
    stacks = [name for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    splits: dict[str, dict[str, list[Split]]] = {}
    for name, heads in attention.items():
        stack = max((stack for stack in stacks if not stack or name.startswith(f"{stack}.")), key=len)
        for field, is_cross in FIELDS.items():
            if is_cross == is_cross_attention(name):
                splits.setdefault(stack, {}).setdefault(field, []).append(heads.attended)
    for name, fields in splits.items():
        model.get_submodule(name).register_forward_hook(partial(_gather_attentions, fields, group))


def _gather_attentions(
    fields: Mapping[str, Sequence[Split]], group: TensorParallelGroup, stack: nn.Module, args: Any, output: Any
) -> Any:
    """Forward hook of a stack: gathers the attentions of each layer; a layer without attention returns nothing, or
    None."""
    for field, splits in fields.items() if isinstance(output, ModelOutput) else ():
        layers = output.get(field)
        if not layers:
            continue
        if len(layers) != len(splits) and any(split != splits[0] for split in splits):
            raise UnsupportedError(
                field,
                got=f"those of {len(layers)} layers",
                expected=f"as many as the {len(splits)} layers with sharded heads, which differ in their heads",
                fix="Load the model without tp_plan to look at its attentions.",
            )
        of_layers = splits if len(layers) == len(splits) else [splits[0]] * len(layers)
        output[field] = tuple(
            tree_map_only(Tensor, partial(_all_heads, field, split, group), layer)
            for layer, split in zip(layers, of_layers, strict=True)
        )
    return output


def _all_heads(field: str, split: Split, group: TensorParallelGroup, weights: Tensor) -> Tensor:
    """Attention weights (..., this rank's heads, queries, keys) of all heads, unless they already are.

    Towers of Qwen2-VL's kind return hidden states (tokens, hidden) in place of weights.
    """
    if weights.ndim < 4 or weights.shape[HEADS] == split.length:
        return weights
    if weights.shape[HEADS] != split.widths[group.rank]:
        raise UnsupportedError(
            field,
            got=f"attention weights of shape {tuple(weights.shape)}",
            expected=f"(..., {split.widths[group.rank]} heads, queries, keys)",
            fix="Load the model without tp_plan to look at its attentions.",
        )
    return _gather(weights, split, untyped(group.process_group), dim=HEADS)
