"""PEFT's adapters on a tensor-parallel model: an adapter's matrices are sharded like the layer that they adapt.

    colwise   x ── A ──f── [B1 | B2] ── added to the base's shard of the output
    rowwise   [x | y] ── [A1 / A2] ──g── B ── added to the base's summed output

Each matrix is a module with its own strategy, so gradients, state dicts and `full_tensor` work. A registration hook of
torch sees every module that becomes a child of another. PEFT's tuner of a tensor-parallel model, and the PeftModel
around it, get methods of this module. PEFT itself is not patched for it, except for swaps; see `files`.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...anatomy import check_values, features
from ...errors import MeshError
from ...features.full_parameters.full_parameters import full_parameters
from ...marks import untyped
from ...model.dropout import generator_of
from ...model.tensor_parallel_model import keep_shards
from ...patches import Patch
from ...ranks.group import GROUP, TensorParallelGroup, agreed
from ...strategies import SHARD, STRATEGY, batch_sharded
from .files import push_peft_model, save_peft_model
from .layers import parameters_as
from .prompts import get_prompt, set_up_prompts
from .shard import (
    check_model,
    check_rotations,
    full_adapters,
    layout_of_vector,
    split_adapter,
    split_tokens,
    strategies_of,
    take_indices,
    unsupported,
)

INITS = (True, False, "gaussian", "orthogonal")
"""Values of a LoraConfig's init_lora_weights that do not read the base layer's weight, which is sharded."""
OF_WEIGHTS = re.compile(r"pissa(_niter_\d+)?|olora", re.IGNORECASE)
"""Values that read the base layer's weight alone, and subtract the adapter from it."""
KINDS = ("LORA", "ADALORA", "OFT", "IA3", "LOHA", "LOKR", "VERA", "LN_TUNING")
"""Types of adapters that are sharded."""


def _joined(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Handle `inner` becoming a child of `outer`; torch calls this for every registered module."""
    if name not in ("model", "base_model") or not type(outer).__module__.startswith("peft."):
        return
    replaced: dict[str, Callable[..., Any]] = {}
    if name == "model" and _group(inner) is not None and hasattr(outer, "inject_adapter"):
        replaced = _TUNER
    elif name == "base_model" and _group(inner) is not None:
        replaced = _PEFT_MODEL
    for method, replacement in replaced.items():
        if hasattr(type(outer), method):
            outer.__dict__[method] = partial(replacement, outer)


WATCH_ADAPTERS = Patch(
    "torch",
    "module registration hook",
    lambda: nn.modules.module.register_module_module_registration_hook(_joined).remove,
)
"""Makes PEFT objects around a tensor-parallel model handle its shards."""


def _group(model: Any) -> TensorParallelGroup | None:
    """The group of a tensor-parallel model, or of the model in a PeftModel; None for others and without a mesh."""
    while model is not None and type(model).__module__.startswith("peft."):
        model = next((model._modules[name] for name in ("base_model", "model") if name in model._modules), None)
    group = getattr(model, "__dict__", {}).get("tp_group")
    return group if isinstance(group, TensorParallelGroup) and group.device_mesh is not None else None


# -- injection


def _inject_full(tuner: Any, model: PreTrainedModel, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """`inject_adapter` of a tuner, on all ranks or on none; its adapters are full, with values of each rank's own."""
    group, config = _group(model), tuner.peft_config[adapter_name]
    assert group is not None
    with group.agree():
        check_model(model)
        if getattr(type(tuner), "tuner_layer_cls", None) is None:
            raise unsupported("PeftMixedModel", "adapters of several types in one model")
        _check_config(tuner._prepare_adapter_config(copy.deepcopy(config), tuner.get_model_config(model)), model)
    for dropout in _dropouts(config):
        _check_random_state(dropout, group)
    with group.agree():
        type(tuner).inject_adapter(tuner, model, adapter_name, *args, **kwargs)


def _inject_adapter(tuner: Any, model: PreTrainedModel, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """`inject_adapter` of a tuner: full adapters first, then sharded like their base layers, with rank 0's values."""
    _inject_full(tuner, model, adapter_name, *args, **kwargs)
    if tuner.peft_config[adapter_name].peft_type == "LN_TUNING":  # copies of modules, with their strategies
        return
    for name, module in list(model.named_modules()):
        if isinstance(module, tuner.tuner_layer_cls):
            split_adapter(name, module, adapter_name, GROUP.of(model))
        elif hasattr(module, "trainable_tokens_delta"):
            split_tokens(module, adapter_name, GROUP.of(model))


def _add_weighted_adapter(tuner: Any, adapters: Any, weights: Any, adapter_name: str, *args: Any, **named: Any) -> None:
    """`add_weighted_adapter` of a tuner, which takes the SVD, quantiles and random masks of full matrices."""
    group = GROUP.of(tuner.model)
    if adapter_name in tuner.peft_config:  # peft leaves it as it is
        return
    with full_adapters(tuner.model, adapters):
        tuner.inject_adapter = partial(_inject_full, tuner)
        try:
            with group.agree():
                type(tuner).add_weighted_adapter(tuner, adapters, weights, adapter_name, *args, **named)
        except BaseException:
            if adapter_name in tuner.peft_config:
                tuner.delete_adapter(adapter_name)
            raise
        finally:
            tuner.inject_adapter = partial(_inject_adapter, tuner)


def _create_and_replace(
    tuner: Any, config: Any, adapter_name: str, target: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """`_create_and_replace` of a tuner, which reads the adapter's widths from the base layer's weight."""
    base: nn.Module = untyped(target).get_base_layer() if hasattr(target, "get_base_layer") else target
    init, shapes = str(getattr(config, "init_lora_weights", "")), _full_shapes(base)
    if config.peft_type == "LN_TUNING":
        shapes = nullcontext()
    elif kwargs.get("parameter_name") is not None:
        check_values(base, "adapters on its parameters")
    else:
        strategies_of(base)
    if OF_WEIGHTS.fullmatch(init) or getattr(config, "use_dora", False):
        check_values(base, f"use_dora or init_lora_weights={init!r}")
        shapes = full_parameters(base, parameters=[untyped(base).weight])
    with shapes:
        type(tuner)._create_and_replace(tuner, config, adapter_name, target, *args, **kwargs)


def _find_dim(tuner: Any, config: Any) -> tuple[int, int]:
    """`_find_dim` of VeRA's tuner, the largest widths, on full shapes."""
    with ExitStack() as stack:
        for module in tuner.model.modules():
            if STRATEGY.find(module) is not None:
                stack.enter_context(_full_shapes(module))
        largest: tuple[int, int] = type(tuner)._find_dim(tuner, config)
        return largest


def _keep_ranks(tuner: Any, rank_pattern: Mapping[str, Sequence[bool]], adapter_name: str) -> None:
    """`resize_modules_by_rank_pattern` of AdaLoRA's tuner, for an adapter that was saved with fewer ranks."""
    for name, kept in rank_pattern.items():
        layer: Any = tuner.model.get_submodule(name.partition(".lora_E")[0])
        layer.r[adapter_name] = sum(kept)
        if layer.lora_alpha[adapter_name] <= 0:
            layer.scaling[adapter_name] = float(sum(kept))
        for owner, dim in ((layer.lora_A, 0), (layer.lora_B, 1), (layer.lora_E, 0)):
            take_indices(owner, adapter_name, dim, [index for index, is_kept in enumerate(kept) if is_kept])


def _full_shapes(base: nn.Module) -> AbstractContextManager[None]:
    """Give `base` parameters of the full shapes in the block, in the memory of one element each."""
    full = {
        name: torch.empty(1, dtype=untyped(param).dtype, device=shard.group.device).expand(shard.shape)
        for name, param in base._parameters.items()
        if (shard := SHARD.find(param)) is not None
    }
    return parameters_as((base, {name: nn.Parameter(each, requires_grad=False) for name, each in full.items()}))


def _cast_adapter_dtype(tuner: Any, *args: Any, **kwargs: Any) -> None:
    """`_cast_adapter_dtype` of a tuner, which creates new parameters."""
    with keep_shards(tuner.model):
        type(tuner)._cast_adapter_dtype(tuner, *args, **kwargs)


_PEFT_MODEL: dict[str, Callable[..., Any]] = {
    "save_pretrained": save_peft_model,
    "push_to_hub": push_peft_model,
    "_setup_prompt_encoder": set_up_prompts,
    "get_prompt": get_prompt,
}
_TUNER: dict[str, Callable[..., Any]] = {
    "inject_adapter": _inject_adapter,
    "_create_and_replace": _create_and_replace,
    "_find_dim": _find_dim,
    "resize_modules_by_rank_pattern": _keep_ranks,
    "_cast_adapter_dtype": _cast_adapter_dtype,
    "add_weighted_adapter": _add_weighted_adapter,
}


def _check_config(config: Any, model: PreTrainedModel) -> None:
    """Raise UnsupportedError, before anything is changed, if an adapter cannot be sharded exactly."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind not in KINDS:
        raise unsupported("peft", f"adapters of the type {kind}")
    if getattr(config, "rank_dropout", None):  # it drops rows of the weight's update
        raise unsupported(type(config).__name__, "rank_dropout")
    if _dropouts(config) and any(batch_sharded(model)):  # ranks draw numbers of their own
        raise unsupported(type(config).__name__, f"{_dropouts(config)[0]}, where ranks have batches of their own")
    rejected = [name for name in ("coft", "module_dropout") if kind == "OFT" and getattr(config, name)]
    if rejected:  # they depend on the number of blocks
        raise unsupported(type(config).__name__, ", ".join(rejected))
    if kind in ("IA3", "OFT") or getattr(config, "use_dora", False):
        _check_targets(config, model)
    if kind != "LORA":
        return
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers,
        get_model_conversion_mapping,
    )

    converted = copy.deepcopy(config)  # transformers may have merged modules into parameters, as Mixtral's experts
    convert_peft_config_for_transformers(converted, model=model, conversions=get_model_conversion_mapping(model))
    options = [field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")]
    options = [option for option in options if option != "use_dora"]
    options += ["layer_replication", "ensure_weight_tying"]
    rejected = sorted({option for option in options if getattr(converted, option, None)})
    if getattr(converted, "target_parameters", None) and OF_WEIGHTS.fullmatch(str(config.init_lora_weights)):
        rejected.append(f"target_parameters with init_lora_weights={config.init_lora_weights!r}")
    if config.init_lora_weights not in INITS and not OF_WEIGHTS.fullmatch(str(config.init_lora_weights)):
        rejected.append(f"init_lora_weights={config.init_lora_weights!r}")
    if rejected:
        raise unsupported("LoraConfig", ", ".join(rejected))


def _dropouts(config: Any) -> list[str]:
    """Names of the dropouts that a config sets."""
    return [name for name in ("lora_dropout", "module_dropout", "vera_dropout") if getattr(config, name, None)]


def _check_targets(config: Any, model: PreTrainedModel) -> None:
    """Raise UnsupportedError if a vector of IA3 or DoRA, or a block of OFT, does not fit the shards of its layer."""
    from peft import IA3Model
    from peft.tuners.tuners_utils import check_target_module_exists

    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if hasattr(module, "get_base_layer"):  # an adapter is there
            module = module.get_base_layer()
        if config.target_modules == "all-linear":
            is_target = features(module) is not None and not isinstance(module, nn.Embedding) and module is not head
        else:
            is_target = check_target_module_exists(config, name)
        if not is_target or ".base_layer" in name:
            continue
        if config.peft_type == "OFT":
            check_rotations(name, module, config)
        elif config.peft_type == "IA3":
            is_feedforward = IA3Model._check_target_module_feedforward(config, name)
            layout_of_vector("IA3", name, module, is_of_inputs=is_feedforward)
        elif isinstance(module, nn.Embedding):
            raise unsupported("DoRA", f"the embedding {name}")
        else:
            layout_of_vector("DoRA", name, module, is_of_inputs=False)


def _check_random_state(dropout: str, group: TensorParallelGroup) -> None:
    """Raise MeshError if ranks would drop different features: their adapters would drift apart."""
    if len(set(group.gather(generator_of(group.device).get_state().numpy().tobytes()))) > 1:
        error = MeshError(
            dropout,
            got="another random state on each rank",
            expected="the same, so that all drop the same features",
            fix=f"Call torch.manual_seed(seed) on all ranks before the adapter is made, or set {dropout}=0.",
        )
        raise agreed(error)
