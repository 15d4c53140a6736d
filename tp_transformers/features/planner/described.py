"""The checkpoint that a config alone describes: its dtype, and the tensors of quantised weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ...anatomy import features, fold_layers, holds_experts, inner_models, tied_parameters
from ...loading.request import LoadRequest, describe, open_checkpoint
from ...slices.lazy import LazyTensor
from ...transformers_api import revert_weight_conversion, should_convert_module
from ..packed.holding import pack_weights
from ..quantized.find import Quantization, locator

SKIPPED = ("modules_to_not_convert", "llm_int8_skip_modules")
"""Settings with names or patterns of modules that stay in floating point."""
_EXPERT = re.compile(r"(?<=\.experts\.)\d+")
"""Number of an expert: settings are for all."""


def described_dtype(config: PretrainedConfig) -> tuple[torch.dtype, str | None]:
    """The dtype of the checkpoint that a config describes, and a note if that is a guess.

    A config that was made from parts may have its dtype in one of them, or nowhere.
    """
    if config.dtype is not None:
        return config.dtype, None
    parts = {key: getattr(config, key, None) for key in ("text_config", *config.sub_configs)}
    for key, part in parts.items():
        dtype = getattr(part, "dtype", None)
        if dtype is not None:
            return dtype, f"the config has a dtype for its {key} alone, which is taken for all; --dtype says otherwise"
    return torch.bfloat16, "the config has no dtype, bfloat16 is a guess; --dtype says otherwise"


def described_packed(model: PreTrainedModel, request: LoadRequest) -> dict[str, LazyTensor]:
    """Parameters of `model` that stay packed -> lazy tensors of a checkpoint that its quantisation describes.

    Linears and experts are quantised, but for those that the settings leave out, the output head and tied weights.
    Layers with the same tensors share the lazy tensors of the first.
    """
    quantization = request.encoding
    assert isinstance(quantization, Quantization)
    state, layers = model.state_dict(), dict[str, list[str]]()
    shapes, settings = {name: tensor.shape for name, tensor in state.items()}, quantization.settings
    form = quantization.format.located(model, locator(model, shapes, request.config.weight_mapping))
    for name in _weights(model, quantization):
        if _is_converted(settings, name):
            layers.setdefault(_layer_of(name), []).append(name)

    @cache
    def stored_as(name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        return form.stored(name, shape, model.dtype) if _is_converted(settings, name) else {}

    tensors, first, first_of = dict[str, torch.Tensor](), dict[Any, str](), dict[str, str]()
    for layer, names in layers.items():
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in revert_weight_conversion(model, {name: state[name] for name in names}).items():
            module, example = name.removesuffix(".weight"), _EXPERT.sub("0", name)
            of_example = stored_as(example, tensor.shape)
            own = {module + key.removeprefix(example.removesuffix(".weight")): of_example[key] for key in of_example}
            stored |= own or {name: tensor}
        kind = tuple(sorted((fold_layers(name), *tensor.shape, str(tensor.dtype)) for name, tensor in stored.items()))
        first_of[layer] = first.setdefault(kind, layer)
        if first_of[layer] == layer:
            tensors |= stored
    request = replace(request, state_dict=tensors)
    with open_checkpoint(request, rank=0) as checkpoint:
        targets = describe(model, checkpoint, {}, request)
    expressions = targets.conversion.expressions
    packed = pack_weights(model, targets, expressions, torch.device("meta"), request).weights
    sources = {name: first_of[layer] + name.removeprefix(layer) for layer, names in layers.items() for name in names}
    return {name: expressions[source] for name, source in sources.items() if source in packed}


def _layer_of(name: str) -> str:
    """The part of a name through its first number; "" if it has none."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found is not None else ""


def _weights(model: PreTrainedModel, quantization: Quantization) -> Iterator[str]:
    """Names of the weights of linears and experts, in the part of `model` that has the settings."""
    ties, head = tied_parameters(model), model.get_output_embeddings()
    part = quantization.sub_config and getattr(model.config, quantization.sub_config)
    within = next(
        (name for name, each in inner_models(model) if part and each.config.model_type == part.model_type), ""
    )
    for prefix, module in model.get_submodule(within).named_modules(prefix=within):
        is_linear = features(module) is not None and not isinstance(module, nn.Embedding)
        if not (is_linear or holds_experts(module)) or (module is head and not quantization.settings.get("lm_head")):
            continue
        for name, param in module.named_parameters(prefix, recurse=False):
            if param.ndim == (2 if is_linear else 3) and name not in ties and name not in ties.values():
                yield name


def _is_converted(settings: Mapping[str, Any], name: str) -> bool:
    """True unless the settings leave out the module of a weight, or the weight of experts."""
    module, lists = name.removesuffix(".weight"), (settings.get(key) or [] for key in SKIPPED)
    excluded = (key[2:] for key in settings.get("dynamic") or () if key.startswith("-:"))  # GPTQ
    within = [each for names in settings.get("modules_in_block_to_quantize") or () for each in names]
    return (
        all(should_convert_module(module, names) for names in lists)
        and not any(re.match(pattern, module) for pattern in excluded)
        and (not within or module.endswith(tuple(within)))
    )
