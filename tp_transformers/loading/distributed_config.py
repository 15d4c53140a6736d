"""transformers' `DistributedConfig`: its fields for tensor parallelism as arguments of this package."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import MeshError, PlanError, UnsupportedError, shown
from ..ranks.group import TP_AXIS
from ..ranks.mesh import join
from .choose_plan import ChangedPlan

_SERVED = {
    "tp_size",
    "tp_plan",
    "enable_sequence_parallel",
    "fsdp_size",
    "dp_replicate_size",
    "fsdp_cpu_offload",
    "fsdp_mixed_precision",
}
"""Supported fields; all others have to be None, 1 or their default."""

_DP_AXIS = "dp"


@dataclass(frozen=True)
class Parallelism:
    """The supported fields of a `DistributedConfig`."""

    arguments: Mapping[str, Any]
    """Equivalent arguments of this package."""
    tp_size: int
    copies: int = 1
    mode: Literal["replicate", "shard"] = "replicate"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `fully_shard`."""

    def mesh(self) -> DeviceMesh | None:
        """The mesh of the copies and of the ranks that share each; None for one copy.

        Raises MeshError if another number of ranks was started.
        """
        if self.copies == 1:
            return None
        group, expected = join(), self.copies * self.tp_size
        if group.size != expected:
            raise MeshError(
                "distributed_config",
                got=f"{self.copies} copies of a model on {self.tp_size} ranks each",
                expected=f"{group.size} ranks in all, as were started",
                fix=f"Launch with torchrun --nproc-per-node {expected}.",
            )
        names = (_DP_AXIS, TP_AXIS)
        return init_device_mesh(group.device.type, (self.copies, self.tp_size), mesh_dim_names=names)

    def make_copies(self, model: Any, mesh: DeviceMesh | None) -> None:
        """Let the copies of `model` train on their own batches; see `data_parallel`."""
        if mesh is not None:
            from ..training.data_parallel import data_parallel  # rarely needed

            data_parallel(model, mesh, mode=self.mode, axis=_DP_AXIS, **self.options)


def read_distributed_config(kwargs: Mapping[str, Any]) -> Parallelism | None:
    """Read the `distributed_config` among the arguments of a `from_pretrained`.

    Returns None without one, or if it asks for no tensor parallelism: transformers handles that. Raises
    UnsupportedError for fields that are not supported beside tensor parallelism, PlanError if another argument
    conflicts with it.
    """
    config = kwargs.get("distributed_config")
    tp_plan, tp_size = getattr(config, "tp_plan", None), getattr(config, "tp_size", None)
    if kwargs.get("tp_plan") is not None or (tp_plan is None and tp_size in (None, 1)):
        return None
    sharded, replicas = (getattr(config, name, None) or 1 for name in ("fsdp_size", "dp_replicate_size"))
    faults = [
        f"{entry.name}={shown(getattr(config, entry.name))}"
        for entry in fields(config)  # type: ignore[arg-type]
        if entry.name not in _SERVED and repr(getattr(config, entry.name)) not in ("None", "1", repr(entry.default))
    ]
    if tp_plan == {}:
        faults.append("tp_plan={}")
    if sharded > 1 and replicas > 1:
        faults.append(f"both fsdp_size={sharded} and dp_replicate_size={replicas}")
    requested = [name for name in ("fsdp_cpu_offload", "fsdp_mixed_precision") if getattr(config, name, False)]
    if sharded == 1:
        faults += [f"{name} without fsdp_size" for name in requested]
    if faults:
        raise UnsupportedError(
            "distributed_config",
            got=f"{', '.join(faults)} beside tensor parallelism",
            expected="tp_size, tp_plan, enable_sequence_parallel, and one of fsdp_size and dp_replicate_size",
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
    arguments: dict[str, Any] = {"tp_plan": ChangedPlan(tp_plan) if isinstance(tp_plan, Mapping) else "auto"}
    if isinstance(tp_plan, str):
        arguments["tp_plan"] = tp_plan
    if getattr(config, "enable_sequence_parallel", False):
        arguments["tp_sequence_parallel"] = True
    copies = sharded * replicas
    if copies == 1:
        arguments["tp_size"] = tp_size
    return Parallelism(
        arguments, int(tp_size or 1), copies, "shard" if sharded > 1 else "replicate", _options(requested)
    )


def _options(requested: Collection[str]) -> dict[str, Any]:
    """Options of `fully_shard` that are equivalent to fields of a `DistributedConfig`."""
    if not requested:
        return {}
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy  # rarely needed

    options: dict[str, Any] = {}
    if "fsdp_cpu_offload" in requested:
        options["offload_policy"] = CPUOffloadPolicy()
    if "fsdp_mixed_precision" in requested:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return options
