"""Shares by the free memory or the speed of the device of each rank."""

from __future__ import annotations

import copy
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import size
from ...loading.request import LoadRequest
from ...logs import get_logger
from ...plans.rules import Plan
from ...ranks.environment import local_size, node_name
from ...ranks.group import TensorParallelGroup
from ...ranks.limits import available_memory
from ..planner.fit import fit_shares, fullest
from ..planner.measured import seconds_of_products
from ..planner.memory import default_context
from ..planner.survey import take_survey


def free_memory(device: torch.device, sharers: int = 1) -> int:
    """Bytes that this process can still allocate on `device`; `sharers`: processes that share a CPU's memory.

    On a CPU, the least of: the memory that the system calls available, and that of the process's control groups, each
    divided by `sharers`; the limits of the process's address space and data segment.
    """
    if device.type != "cpu":
        module: Any = torch.get_device_module(device.type)
        return int(module.mem_get_info(device)[0])
    return min([available_memory() // max(1, sharers), *_left_of_limits()])


def _left_of_limits() -> list[int]:
    """Bytes left of the limits on this process's address space and data segment."""
    try:
        import resource  # not on Windows

        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        used = {name: 1024 * int(fields[field].split()[0]) for name, field in (("AS", "VmSize"), ("DATA", "VmData"))}
    except (ImportError, OSError, KeyError):
        return []
    limits = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in used}
    return [max(0, limit - used[name]) for name, limit in limits.items() if limit != resource.RLIM_INFINITY]


logger = get_logger(__name__)

NOISE = 0.1
"""Times of products that differ by less do not make a device slower."""


def by_memory(
    plan: Plan, model: PreTrainedModel, group: TensorParallelGroup, request: LoadRequest
) -> tuple[tuple[float, ...], str]:
    """Shares with which each rank fills the same fraction of its free memory."""
    nodes = group.gather(node_name() if group.device.type == "cpu" else None)
    sharers = max(nodes.count(nodes[group.rank]), local_size() or 1)
    memory = group.gather(max(1, free_memory(group.device, sharers)))

    def fit() -> tuple[tuple[float, ...], float]:
        survey = take_survey(str(model.config.name_or_path), copy.deepcopy(model), plan, request)
        planned = fit_shares(survey, memory, context=default_context(model))
        return planned.survey.plan.shares or (), fullest(planned, memory)

    shares, filled = group.from_first(fit)
    if filled > 1 and group.rank == 0:
        logger.warning("the model needs %.0f%% of the memory that is free on the fullest rank", 100 * filled)
    return shares, f"{', '.join(map(size, memory))} free, {filled:.0%} needed"


def by_speed(
    plan: Plan, model: PreTrainedModel, group: TensorParallelGroup, request: LoadRequest
) -> tuple[tuple[float, ...], str]:
    """Shares in inverse proportion to each rank's time: the mean of its seconds for two products, each relative to
    those of all ranks. Even ones if the times differ by less than NOISE."""
    group.gather(None)  # all measure at the same time
    with group.agree() as seconds:
        seconds.append(seconds_of_products(group.device, model.dtype))
    means = [statistics.fmean(column) for column in zip(*seconds, strict=True)]
    times = [sum(value / mean for value, mean in zip(pair, means, strict=True)) for pair in seconds]
    shares = [round(1000 / time / sum(1 / time for time in times)) for time in times]
    measured = ", ".join(f"{one * 1e3:.2f} and {many * 1e3:.2f} ms" for one, many in seconds)
    is_noise = max(times) < (1 + NOISE) * min(times)
    return (1,) * group.size if is_noise else tuple(max(1, share) for share in shares), f"products in {measured}"
