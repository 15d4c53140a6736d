"""Shares by the free memory or the speed of the device of each rank."""

from __future__ import annotations

import copy
import statistics

from transformers import PreTrainedModel

from ...errors import size
from ...loading.request import LoadRequest
from ...logs import get_logger
from ...plans.rules import Plan
from ...ranks.environment import local_size, node_name
from ...ranks.group import TensorParallelGroup
from ..planner.fit import fit_shares, fullest
from ..planner.memory import default_context
from ..planner.survey import take_survey
from .capacity import free_memory, seconds_of_products

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
        allowed = bool(request.options.get("allow_replicated"))
        planned = fit_shares(survey, memory, context=default_context(model), allow_replicated=allowed)
        return planned.survey.plan.numbers or (), fullest(planned, memory)

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
