"""PEFT's prompts before a tensor-parallel model: replicated embeddings, with rank 0's values."""

from __future__ import annotations

from typing import Any

from ...ranks import direct
from ...ranks.group import GROUP
from .shard import unsupported

KINDS = ("PROMPT_TUNING", "P_TUNING")
"""Types of prompts that enter a model in place of embeddings; others enter its cache or its attention."""


def set_up_prompts(peft_model: Any, adapter_name: str) -> None:
    """`_setup_prompt_encoder` of a PeftModel, on all ranks or on none. Raises UnsupportedError for another type."""
    group = GROUP.of(peft_model.base_model)
    with group.agree():
        kind = peft_model.peft_config[adapter_name].peft_type
        kind = getattr(kind, "value", kind)
        if kind not in KINDS:
            raise unsupported("peft", f"adapters of the type {kind}")
        type(peft_model)._setup_prompt_encoder(peft_model, adapter_name)
    for param in peft_model.prompt_encoder[adapter_name].parameters():
        direct.broadcast(param.data, group.process_group, 0)
