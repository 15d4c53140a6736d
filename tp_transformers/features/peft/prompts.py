"""PEFT's prompts and prefixes before a tensor-parallel model: replicated, with rank 0's values.

They come before the tokens of a prompt:

    prompt tuning, P-tuning   embeddings before those of the tokens
    prefix tuning             keys and values before those of each layer: every rank's cache gets those of its heads
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...marks import untyped
from ...model.parallelize import WRAPPED
from ...plans.attention import AttentionHeads
from ...ranks import direct
from ...ranks.collectives import copy_to_region
from ...ranks.group import GROUP, TensorParallelGroup
from ...slices.layout import Layout
from ...strategies import take
from .shard import check_model, unsupported

KINDS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
"""Types of prompts that enter a model in place of embeddings, or as its cache."""


def set_up_prompts(peft_model: Any, adapter_name: str) -> None:
    """`_setup_prompt_encoder` of a PeftModel, on all ranks or on none. Raises UnsupportedError for another type."""
    group, config = GROUP.of(peft_model.base_model), peft_model.peft_config[adapter_name]
    with group.agree():
        check_model(peft_model.base_model)
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind not in KINDS:
            raise unsupported("peft", f"adapters of the type {kind}")
        if kind == "PREFIX_TUNING" and peft_model.base_model.config.is_encoder_decoder:
            raise unsupported("peft", "prefixes of an encoder and a decoder")
        type(peft_model)._setup_prompt_encoder(peft_model, adapter_name)
    WRAPPED.put(peft_model.base_model, True)
    for param in peft_model.prompt_encoder[adapter_name].parameters():
        direct.broadcast(param.data, group.process_group, 0)


def get_prompt(peft_model: Any, *args: Any, **kwargs: Any) -> Any:
    """`get_prompt` of a PeftModel: embeddings, or a cache with the keys and values of this rank's heads."""
    prompt = type(peft_model).get_prompt(peft_model, *args, **kwargs)
    model = peft_model.base_model
    for name, heads in model.tp_resolution.attention.items() if hasattr(prompt, "layers") else ():
        layer = prompt.layers[model.get_submodule(name).layer_idx]
        layer.keys, layer.values = (_own_heads(states, heads, model.tp_group) for states in (layer.keys, layer.values))
    return prompt


def _own_heads(states: Tensor, heads: AttentionHeads, group: TensorParallelGroup) -> Tensor:
    """states: (batch, KV heads, tokens, head_dim) -> (batch, KV heads/size, tokens, head_dim)."""
    copied = copy_to_region(states, untyped(group.process_group), group.reduce_dtype)
    return take(copied, Layout(1, heads.kv), group.rank)
