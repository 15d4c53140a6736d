"""The share of each rank in a load: as the caller or the plan says, or by the memory or speed of the devices."""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace

from transformers import PreTrainedModel

from ..logs import get_logger
from ..plans.rules import Plan
from ..ranks.environment import node_name
from ..ranks.group import TensorParallelGroup
from ..slices.layout import ranks_of
from ..text import size
from .footprint.capacity import free_memory, seconds_of_products
from .footprint.fit import fit_shares, fullest
from .footprint.memory import default_context
from .footprint.survey import take_survey
from .request import LoadRequest

logger = get_logger(__name__)


def settle_shares(
    plan: Plan, model: PreTrainedModel, group: TensorParallelGroup, request: LoadRequest
) -> tuple[Plan, str]:
    """Replace `shares: memory` and `shares: speed` by numbers, the same on all ranks; returns also their reason.

    A pre-sharded checkpoint that is loaded on as many ranks as it was saved on, without other shares, keeps its own.
    Collective over the `tp` axis. `model` is on the meta device.
    """
    asked = plan.shares
    group.check_same({"tp_shares": asked})
    saved = request.sharded.shares if request.sharded is not None else None
    if asked is None and saved is not None and len(saved) == group.size:
        return replace(plan, shares=saved), "as saved"
    if not isinstance(asked, str):
        return plan, ""
    if group.size == 1:
        return replace(plan, shares=None), ""
    found, reason = _by_speed(model, group) if asked == "speed" else _by_memory(plan, model, group, request)
    ranks = ranks_of(found)
    if group.rank == 0:
        logger.info("tp_shares=%s, by %s: %s", list(found), asked, reason)
    return replace(plan, shares=None if isinstance(ranks, int) else found), f"by {asked}: {reason}"


def _by_memory(
    plan: Plan, model: PreTrainedModel, group: TensorParallelGroup, request: LoadRequest
) -> tuple[tuple[float, ...], str]:
    """Shares with which each rank fills the same fraction of its free memory."""
    nodes = group.gather(node_name() if group.device.type == "cpu" else None)
    memory = group.gather(max(1, free_memory(group.device, nodes.count(nodes[group.rank]))))

    def fit() -> tuple[tuple[float, ...], float]:
        survey = take_survey(str(model.config.name_or_path), copy.deepcopy(model), plan, request)
        allowed = bool(request.options.allow_replicated)
        planned = fit_shares(survey, memory, context=default_context(model), allow_replicated=allowed)
        shares = planned.survey.plan.shares
        assert isinstance(shares, tuple)
        return shares, fullest(planned, memory)

    shares, filled = group.from_first(fit)
    if filled > 1 and group.rank == 0:
        logger.warning("the model needs %.0f%% of the memory that is free on the fullest rank", 100 * filled)
    return shares, f"{', '.join(map(size, memory))} free, {filled:.0%} needed"


def _by_speed(model: PreTrainedModel, group: TensorParallelGroup) -> tuple[tuple[float, ...], str]:
    """Shares in inverse proportion to each rank's seconds for two products, both relative to the mean of all ranks."""
    group.gather(None)  # all measure at the same time
    with group.agree() as seconds:
        seconds.append(seconds_of_products(group.device, model.dtype))
    means = [statistics.fmean(column) for column in zip(*seconds, strict=True)]
    costs = [sum(value / mean for value, mean in zip(pair, means, strict=True)) for pair in seconds]
    shares = tuple(round(1000 / cost / sum(1 / cost for cost in costs)) for cost in costs)
    times = ", ".join(f"{one * 1e3:.2f} and {many * 1e3:.2f} ms" for one, many in seconds)
    return tuple(max(1, share) for share in shares), f"products of 1 and of 64 tokens in {times}"
