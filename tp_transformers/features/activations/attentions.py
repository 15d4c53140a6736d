"""Attentions of all heads, gathered where a model returns them (`output_attentions=True`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...anatomy import HEADS, is_cross_attention
from ...errors import UnsupportedError
from ...plans.attention import AttentionHeads
from ...ranks.collectives import Group, gather_from_region
from ...ranks.group import TensorParallelGroup
from ...slices.layout import Split
from ...torch_api import tree_map_only

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
        model.get_submodule(name).register_forward_hook(_gather_hook(fields, group.rank, group.process_group))


def _gather_hook(
    fields: Mapping[str, Sequence[Split]], rank: int, process_group: Group
) -> Callable[[nn.Module, Any, Any], Any]:
    def gather(stack: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, ModelOutput):
            for field, splits in fields.items():
                if output.get(field):
                    output[field] = _gather(field, output[field], splits, rank, process_group)
        return output

    return gather


def _gather(
    field: str, weights: Sequence[Tensor | None], splits: Sequence[Split], rank: int, process_group: Group
) -> tuple[Tensor | None, ...]:
    """All-gather the attentions of each layer; backward: this rank's slice."""
    if len(weights) != len(splits):  # layers without attention return nothing, or None
        if any(split != splits[0] for split in splits):
            raise UnsupportedError(
                field,
                got=f"those of {len(weights)} layers",
                expected=f"as many as the {len(splits)} layers with sharded heads, which differ in their heads",
                fix="Load the model without tp_plan to look at its attentions.",
            )
        splits = [splits[0]] * len(weights)
    return tuple(
        tree_map_only(
            Tensor, lambda layer, split=split: _all_heads(field, layer, split, rank, process_group), layer_weights
        )
        for layer_weights, split in zip(weights, splits, strict=True)
    )


def _all_heads(field: str, weights: Tensor, split: Split, rank: int, process_group: Group) -> Tensor:
    """Attention weights (..., this rank's heads, queries, keys) of all heads, unless they already are.

    Towers of Qwen2-VL's kind return hidden states (tokens, hidden) in place of weights.
    """
    if weights.ndim < 4 or weights.shape[HEADS] == split.length:
        return weights
    if weights.shape[HEADS] != split.widths[rank]:
        raise UnsupportedError(
            field,
            got=f"attention weights of shape {tuple(weights.shape)}",
            expected=f"(..., {split.widths[rank]} heads, queries, keys)",
            fix="Load the model without tp_plan to look at its attentions.",
        )
    return _in_order(gather_from_region(weights, split.widths, process_group, dim=HEADS), split)


def _in_order(weights: Tensor, split: Split) -> Tensor:
    """Sort the gathered heads as in the unsharded model; a rank may hold heads of several ranges."""
    order = [head for ranges in split.ranges for start, stop in ranges for head in range(start, stop)]
    if order == sorted(order):
        return weights
    return weights.index_select(HEADS, torch.tensor(order, device=weights.device).argsort())
