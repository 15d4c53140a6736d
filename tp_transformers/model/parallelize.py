"""A meta-device model and a plan -> the same model with local shapes and communication attached."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ..anatomy import base_prefix, fold_layers, owner_of
from ..logs import get_logger
from ..marks import Mark
from ..plans.bind import Resolution, resolve
from ..plans.rules import Plan
from ..ranks.group import GROUP, TensorParallelGroup
from ..strategies import ParamShard, TensorParallelLayer, attach, join_layers
from ..strategies.signature import FEATURES
from .dropout import OwnRandomness
from .tensor_parallel_model import become_tensor_parallel, hold_patches, keep_state

logger = get_logger(__name__)

WRAPPED: Mark[bool] = Mark("tp_wrapped")
"""True on a model that is trained with parameters of a wrapper around the model."""


def is_tensor_parallel(model: object) -> bool:
    """True if `model` was loaded with a `tp_plan` by this package (also on one rank), or is a wrapper of one."""
    return isinstance(GROUP.find(model), TensorParallelGroup)


def parallelize(model: PreTrainedModel, plan: Plan, group: TensorParallelGroup) -> Resolution:
    """Give every parameter of `model`, on the meta device, its local shape, and every module its communication.

    Raises PlanError if the plan does not fit; the model is then unchanged.
    """
    # 1. Bind the plan to the modules. All faults are reported before anything is changed.
    resolution = _bind(model, plan, group)
    # 2. Local shapes.
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    shards = {name: _local_parameter(model, name, resolution, group) for name in names}
    # 3. Local head counts, set on the modules: the config is shared and stays unchanged.
    for name, heads in resolution.split_heads.items():
        heads.count(model, name, group.rank)
    # 4. Communication.
    if group.device_mesh is not None:
        _attach_strategies(model, resolution, shards, group, group.device_mesh)
        _attach_randomness(model, resolution, group)
    # 5. The model, and the models inside it, become TensorParallelModels.
    hold_patches(model)
    for module in list(model.modules()):
        if hasattr(module, "save_pretrained"):
            become_tensor_parallel(module, resolution, group)
    model._tp_plan = resolution.plan.as_dict(base_prefix(model))
    model._tp_size = group.size
    model._device_mesh = group.device_mesh
    return resolution


def _bind(model: PreTrainedModel, plan: Plan, group: TensorParallelGroup) -> Resolution:
    """Bind the plan to the modules, compare plan and model between ranks, and log the replicated parameters."""
    with group.agree():
        resolution = resolve(plan, model, group.size)
        config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)  # nodes may have the checkpoint under different paths
    plan = resolution.plan
    group.check_same(
        {
            "the plan": plan.as_dict(),
            "tp_reduce_dtype": str(group.reduce_dtype),
            "the model's parameters": {name: (tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()},
            **{f"{name} of the model's config": str(value) for name, value in config.items()},
        }
    )
    if group.rank == 0:
        for note in resolution.notes:
            logger.warning("%s", note)
        if resolution.uncovered:
            folded = sorted(set(map(fold_layers, resolution.uncovered)))
            logger.info("%s: no rule covers %s; they are replicated", plan.source, ", ".join(folded))
    return resolution


def _local_parameter(model: nn.Module, name: str, resolution: Resolution, group: TensorParallelGroup) -> ParamShard:
    """Replace one meta parameter by one of this rank's local shape; returns its ParamShard."""
    owner, param_type = owner_of(model, name)
    full: nn.Parameter = getattr(owner, param_type)
    shard = resolution.shard(name, full.shape, group)
    local = torch.empty(shard.local_shape, dtype=full.dtype, device="meta")
    owner._parameters[param_type] = shard.wrap(local, requires_grad=full.requires_grad)
    return shard


def _attach_strategies(
    model: nn.Module,
    resolution: Resolution,
    shards: Mapping[str, ParamShard],
    group: TensorParallelGroup,
    mesh: DeviceMesh,
) -> None:
    """Attach strategies to modules that communicate, hold a sharded parameter, or compute with this rank's heads."""
    strategies = resolution.module_strategies.values()
    takes_dtensors = any(strategy.shards_as_torch or not strategy.use_local_output for strategy in strategies)
    owners = dict(resolution.module_strategies)
    for name in resolution.param_strategies:
        owners.setdefault(name.rpartition(".")[0], TensorParallelLayer())
    for name, strategy in owners.items():
        module = model.get_submodule(name)
        own = {param: shards[f"{name}.{param}".lstrip(".")] for param, _ in module.named_parameters(recurse=False)}
        attach(module, strategy, own, mesh, takes_dtensors=takes_dtensors)
    for name, strategy in resolution.module_strategies.items():
        strategy.completed(model.get_submodule(name), mesh)
    for module in model.modules():
        if module._parameters:
            keep_state(module)
    for name, heads in resolution.split_heads.items():
        heads.attach(model, name, shards, group.rank)


def _attach_randomness(model: nn.Module, resolution: Resolution, group: TensorParallelGroup) -> None:
    """Let modules draw this rank's own random numbers for sharded activations, shared ones for replicated ones."""
    for name in dict.fromkeys(
        name if strategy.signature.computes_locally else name.rpartition(".")[0]
        for name, strategy in resolution.module_strategies.items()
        if strategy.signature.leaves is FEATURES or strategy.signature.computes_locally
    ):
        join_layers(model.get_submodule(name))
        OwnRandomness(group.rank, group.device).attach(model.get_submodule(name))
