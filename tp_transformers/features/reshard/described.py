"""What ranks that join have to know of a model; and the model that a reshard leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from ...checkpoint.conversion.convert import identity
from ...checkpoint.saving.save import STORED_FORM
from ...errors import UnsupportedError
from ...marks import untyped
from ...model.dropout import random_states
from ...plans.rules import Plan
from ...ranks.group import GROUP, TensorParallelGroup

_OF_RANKS = ("tp_shares", "tp_stream", "tp_map")
"""Options that belong to the old ranks, or to the files of the load."""


@dataclass(frozen=True)
class Described:
    """A loaded model without its weights; all of it can be pickled."""

    cls: type
    config: Any
    plan: Plan
    options: Mapping[str, Any]
    """Arguments of the load that stay."""
    loaded_with: Mapping[str, Any]
    """All options of the load."""
    dtype: torch.dtype
    frozen: frozenset[str]
    """Parameters without `requires_grad`."""
    training: frozenset[str]
    """Modules in training mode."""
    checkpointed: Mapping[str, Any]
    """Modules that compute activations again in the backward -> the function that does so."""
    source: Mapping[str, Any]
    conversions: Sequence[Any]
    random_states: Any

    @staticmethod
    def of(model: PreTrainedModel) -> Described:
        config = copy.deepcopy(model.config)
        form = STORED_FORM.find(model)
        if form is not None:
            form.put_into(config)
        loaded = untyped(model).tp_options
        options = {name: value for name, value in loaded.items() if name not in _OF_RANKS}
        options["attn_implementation"] = copy.deepcopy(model.config._attn_implementation)
        if getattr(model, "generation_config", None) is not None:
            options["generation_config"] = copy.deepcopy(model.generation_config)
        frozen = (name for name, param in model.named_parameters() if not param.requires_grad)
        return Described(
            cls=type(model).__bases__[-1],
            config=config,
            plan=untyped(model).tp_resolution.asked,
            options=options,
            loaded_with=loaded,
            dtype=model.dtype,
            frozen=frozenset(frozen),
            training=frozenset(name for name, module in model.named_modules() if module.training),
            checkpointed={
                name: getattr(module, "_gradient_checkpointing_func", None)
                for name, module in model.named_modules()
                if getattr(module, "gradient_checkpointing", False)
            },
            source=dict(untyped(model).tp_source),
            conversions=[identity(entry) for entry in getattr(model, "_weight_conversions", None) or ()],
            random_states=random_states(GROUP.of(model).device),
        )

    def put_into(self, model: PreTrainedModel) -> None:
        """Complete a model that has the weights."""
        untyped(model).tp_options = self.loaded_with
        model.config.name_or_path = untyped(model).name_or_path = self.config.name_or_path
        for name, param in model.named_parameters():
            if name in self.frozen:
                param.requires_grad_(False)
        for name, module in model.named_modules():
            module.training = name in self.training
            if name in self.checkpointed:
                untyped(module).gradient_checkpointing = True
                untyped(module)._gradient_checkpointing_func = self.checkpointed[name]


def check_supported(model: Any) -> None:
    """Raise UnsupportedError for a model that cannot be resharded."""
    group: TensorParallelGroup | None = GROUP.find(model)
    params = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    fix = "Save it, and load it on the other ranks."
    got = ""
    if group is None or not isinstance(model, PreTrainedModel) or not hasattr(model, "tp_options"):
        got, fix = f"a {type(model).__name__}", 'Load it with tp_plan="auto".'
    elif group.copies is not None or (group.mesh is not None and group.mesh.ndim > 1):
        got = "one of several copies of a model"
    elif any(getattr(getattr(param, "tp_shard", None), "resharded_over", None) for param in params.values()):
        got = "shards that FSDP has sharded again"
    elif getattr(model, "_hf_peft_config_loaded", False) or params.keys() - model.tp_resolution.layouts.keys() - {
        *model.tp_resolution.uncovered
    }:
        got = "a model with adapters, or with other parameters that were added after the load"
        fix = "Merge or save them, and add them to the model on the other ranks."
    elif any(param.grad is not None for param in params.values()):
        got, fix = "parameters with gradients", "Call it between steps, after optimizer.zero_grad()."
    if got:
        raise UnsupportedError("reshard", got=got, expected="a model that was loaded with a plan", fix=fix)


class Moved:
    """What is left of a model whose weights are in another: each use of it raises UnsupportedError."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error()

    @staticmethod
    def _error() -> UnsupportedError:
        got, fix = "a model that was resharded", "Use the model that reshard returned; a rank that left has none."
        return UnsupportedError("call", got=got, expected="a model with weights", fix=fix)

    @staticmethod
    def leave(model: Any) -> None:
        """Take everything from a model."""
        model.__dict__.clear()
        model.__class__ = Moved
