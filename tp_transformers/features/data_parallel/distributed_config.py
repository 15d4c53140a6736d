"""transformers' `DistributedConfig`: its fields for tensor parallelism as arguments of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import PreTrainedModel

from ...anatomy import base_prefix
from ...errors import MeshError, PlanError, UnsupportedError, shown
from ...loading.choose_plan import ModelPlan, auto_plan
from ...logs import PACKAGE, get_logger
from ...marks import untyped
from ...plans.rules import Plan
from ...ranks.environment import local_device
from ...ranks.group import TP_AXIS, TensorParallelGroup, agreed, reported
from ...ranks.mesh import join

logger = get_logger(__name__)

_SERVED = {
    "tp_size",
    "tp_plan",
    "enable_sequence_parallel",
    "enable_expert_parallel",
    "ep_size",
    "ep_plan",
    "ep_implementation",
    "fsdp_size",
    "dp_replicate_size",
    "fsdp_cpu_offload",
    "fsdp_mixed_precision",
}
"""Supported fields; all others have to be None, 1 or their default."""

_POLICIES: Mapping[str, tuple[str, Any]] = {
    "fsdp_cpu_offload": ("offload_policy", CPUOffloadPolicy()),
    "fsdp_mixed_precision": ("mp_policy", MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
}
"""Fields that are true or false -> the same option of `fully_shard`, and its value."""

_EP_STYLES = ("ep_dispatch_experts", "grouped_gemm")
_DP_AXIS = "dp"


@dataclass(frozen=True)
class Parallelism:
    """The supported fields of a `DistributedConfig`."""

    arguments: Mapping[str, Any]
    """Equivalent arguments of this package."""
    tp_size: int
    """Ranks that share the sharded modules."""
    copies: int = 1
    sharded: int = 1
    """Ranks that divide the parameters of a copy among them, as FSDP2 does: `model.fsdp_size`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `fully_shard`."""

    def mesh(self) -> DeviceMesh | None:
        """The mesh of the copies and of the ranks that share each; None unless ranks train on different batches.

        Raises MeshError if another number of ranks was started.
        """
        if self.copies == 1 and "tp_batch_sharded" not in self.arguments:
            return None
        group, expected = join(), self.copies * self.tp_size
        if group.size != expected:
            raise MeshError(
                "distributed_config",
                got=f"{self.copies} {'copy' if self.copies == 1 else 'copies'} of a model on {self.tp_size} ranks each",
                expected=f"{group.size} ranks in all, as were started",
                fix=f"Launch with tp-transformers run -n {expected}, or torchrun --nproc-per-node {expected}.",
            )
        names = (_DP_AXIS, TP_AXIS)
        return init_device_mesh(group.device.type, (self.copies, self.tp_size), mesh_dim_names=names)

    def load(self, load: Callable[[dict[str, Any]], Any], given: Mapping[str, Any]) -> Any:
        """Load a copy of the model on each row of the mesh, and let the copies train together; see `data_parallel`.

        Args:
            load: takes arguments with a `tp_plan`.
            given: arguments with a `distributed_config`.

        Returns what `load` does. Raises its error on the ranks of all copies if it fails on those of one.
        """
        mesh = self.mesh()
        arguments = {**given, **self.arguments, "device_mesh": mesh}
        del arguments["distributed_config"]
        if mesh is None:
            return self._marked(load(arguments))
        copies = TensorParallelGroup.of_mesh(mesh[_DP_AXIS], local_device(mesh.device_type))
        try:
            result = load(arguments)
        except Exception as error:
            copies.gather(reported(error))
            raise
        for index, report in enumerate(copies.gather(None)):
            if report is not None:
                kind, text = report
                raise agreed(kind(f"copy {index} of the model: {text}"))

        from .data_parallel import data_parallel  # rarely needed

        model = result[0] if isinstance(result, tuple) else result
        mode: Any = "shard" if self.sharded > 1 else "replicate"
        data_parallel(model, mesh, mode=mode, axis=_DP_AXIS, **self.options)
        return self._marked(result)

    def _marked(self, result: Any) -> Any:
        """The result of a load, whose model has the `fsdp_size` that transformers' own load gives it."""
        untyped(result[0] if isinstance(result, tuple) else result)._fsdp_size = self.sharded
        return result


def read_distributed_config(kwargs: Mapping[str, Any]) -> Parallelism | None:
    """Read the `distributed_config` among the arguments of a `from_pretrained`.

    Returns None if transformers shall shard the model: it asks for no tensor or expert parallelism, names
    `ExpertExchange`, or shards experts over more ranks than the dense modules. Raises UnsupportedError for fields
    that are not supported, PlanError if another argument conflicts with it.
    """
    config = kwargs["distributed_config"]
    if not hasattr(config, "tp_size"):  # older releases of transformers: it is the only field
        alone = Parallelism({"tp_plan": "auto", "tp_expert_parallel": "alone"}, 1)
        return alone if getattr(config, "enable_expert_parallel", False) else None
    tp_plan, tp_size, ep_size = config.tp_plan, config.tp_size or 1, getattr(config, "ep_size", None) or 1
    if (tp_plan is None and tp_size == ep_size == 1) or getattr(config, "ep_implementation", "") == PACKAGE:
        return None
    if 1 < tp_size < ep_size:
        logger.info("ep_size=%d above tp_size=%d: transformers shards the model itself", ep_size, tp_size)
        return None
    sharded, replicas = (getattr(config, name, None) or 1 for name in ("fsdp_size", "dp_replicate_size"))
    requested = [name for name in _POLICIES if getattr(config, name, False)]
    faults = [
        f"{entry.name}={shown(getattr(config, entry.name))}"
        for entry in fields(config)
        if entry.name not in _SERVED and repr(getattr(config, entry.name)) not in ("None", "1", repr(entry.default))
    ]
    faults += _expert_faults(config, tp_size, ep_size) if ep_size > 1 else ["tp_plan={}"] if tp_plan == {} else []
    if sharded > 1 and replicas > 1 and ep_size <= tp_size:
        faults.append(f"both fsdp_size={sharded} and dp_replicate_size={replicas}")
    if sharded == 1:
        faults += [f"{name} without fsdp_size" for name in requested]
    if faults:
        raise UnsupportedError(
            "distributed_config",
            got=f"{', '.join(faults)} beside tensor parallelism",
            expected="tp_size, tp_plan, enable_sequence_parallel, ep_size, and one of fsdp_size and dp_replicate_size",
            fix="Leave it out, or call tp_transformers.disable() to load by transformers' own.",
        )
    for name in ("tp_size", "device_mesh", "device_map"):
        if kwargs.get(name) is not None:
            raise PlanError(
                "from_pretrained",
                got=f"both distributed_config and {name}",
                expected="one of them",
                fix=f"Leave out {name}.",
            )
    rules = {**(tp_plan if isinstance(tp_plan, Mapping) else {}), **(getattr(config, "ep_plan", None) or {})}
    arguments: dict[str, Any] = {"tp_plan": ModelPlan(partial(_changed_plan, rules)) if rules else tp_plan or "auto"}
    if getattr(config, "enable_sequence_parallel", False):
        arguments["tp_sequence_parallel"] = True
    if ep_size > 1:
        arguments["tp_expert_parallel"] = "alone" if tp_plan == {} else True
    copies = sharded * replicas
    if ep_size > tp_size:  # ranks with batches of their own exchange tokens
        arguments["tp_batch_sharded"] = "experts"
        copies, tp_size = copies // ep_size, ep_size
    elif copies == 1:
        # A config with a plan takes the number of ranks from the launcher: one without a launcher is warned of.
        arguments["tp_size"] = None if tp_plan is not None and tp_size == 1 else tp_size
    return Parallelism(arguments, tp_size, copies, sharded, dict(_POLICIES[name] for name in requested))


def _expert_faults(config: Any, tp_size: int, ep_size: int) -> Iterator[str]:
    """Yield the unsupported fields of expert parallelism."""
    fits = ("auto", "all_reduce" if tp_size == ep_size else "all_to_all")
    implementation = getattr(config, "ep_implementation", "auto")
    if implementation not in fits:
        yield f"ep_implementation={implementation!r} where {' and '.join(fits)} fit"
    styles = {shown(style) for style in (getattr(config, "ep_plan", None) or {}).values()}
    unknown = styles - {shown(style) for style in _EP_STYLES}
    if unknown:
        yield f"ep_plan with {', '.join(sorted(unknown))}"


def _changed_plan(rules: Mapping[str, Any], model: PreTrainedModel) -> Plan:
    """The plan of "auto" with `rules`, {name in the full model: strategy}, in place of those for the same names."""
    base, prefix = auto_plan(model), base_prefix(model)
    source = f"{base.source}, with rules of distributed_config"
    own = Plan.from_dict(rules, source=source).rules
    names = {rule.full(prefix) for rule in own}
    kept = (rule for rule in base.rules if rule.full(prefix) not in names)
    return replace(base, source=source, rules=(*kept, *own))
