"""The share of each rank in a load: as the caller says, or by the memory or speed of the devices."""

from __future__ import annotations

import copy
import os
import statistics
from dataclasses import replace

from transformers import PreTrainedModel

from ..logs import get_logger
from ..plans.parse import shares_of
from ..plans.rules import Plan
from ..ranks.environment import local_size, node_name
from ..ranks.group import TP_AXIS, TensorParallelGroup
from ..slices.layout import ranks_of
from ..text import size
from .footprint.capacity import free_memory, seconds_of_products
from .footprint.fit import fit_shares, fullest
from .footprint.memory import default_context
from .footprint.survey import take_survey
from .request import LoadRequest

logger = get_logger(__name__)

SHARES = "TP_TRANSFORMERS_SHARES"
"""Environment variable with shares for loads that ask for none: `2,1,1`, `memory` or `speed`."""
NOISE = 0.1
"""Times of products that differ by less do not make a device slower."""


def resolve_shares(
    plan: Plan, model: PreTrainedModel, group: TensorParallelGroup, request: LoadRequest
) -> tuple[Plan, str]:
    """Resolve the shares of the plan: numbers, the same on all ranks, or None; returns also their reason.

    The caller's come first, then the environment's, then those of a pre-sharded checkpoint on as many ranks. "memory"
    and "speed" become numbers; copies of a model take those of the first copy. Collective over the `tp` axis, and over
    the axes of copies. `model` is on the meta device.

    Raises MeshError if ranks ask for different shares, PlanError for a malformed TP_TRANSFORMERS_SHARES.
    """
    asked, reason = plan.shares, ""
    with group.agree() as everyone:
        if asked is None and os.environ.get(SHARES):
            asked, reason = shares_of(os.environ[SHARES], subject=SHARES), f"by {SHARES}"
        everyone.append(asked)
    if len(set(everyone)) > 1:
        group.check_same({"tp_shares": asked})  # raises
    saved = request.storage.shares
    if asked is None and saved is not None and len(saved) == group.size:
        asked, reason = tuple(saved), "as saved"
    if not isinstance(asked, str) or group.size == 1:
        return replace(plan, shares=None if isinstance(asked, str) else asked), reason
    found, measured = _by_speed(model, group) if asked == "speed" else _by_memory(plan, model, group, request)
    if group.mesh is not None and group.mesh.ndim > 1:
        for axis in (group.mesh[name] for name in group.mesh.mesh_dim_names or () if name != TP_AXIS):
            found = TensorParallelGroup.of_mesh(axis, group.device).gather(found)[0]
    if group.rank == 0:
        logger.info("tp_shares=%s, by %s: %s", list(found), asked, measured)
    is_even = isinstance(ranks_of(found), int)
    return replace(plan, shares=None if is_even else found), f"by {asked}: {measured}"


def _by_memory(
    plan: Plan, model: PreTrainedModel, group: TensorParallelGroup, request: LoadRequest
) -> tuple[tuple[float, ...], str]:
    """Shares with which each rank fills the same fraction of its free memory."""
    nodes = group.gather(node_name() if group.device.type == "cpu" else None)
    sharers = max(nodes.count(nodes[group.rank]), local_size() or 1)
    memory = group.gather(max(1, free_memory(group.device, sharers)))

    def fit() -> tuple[tuple[float, ...], float]:
        survey = take_survey(str(model.config.name_or_path), copy.deepcopy(model), plan, request)
        allowed = bool(request.options.allow_replicated)
        planned = fit_shares(survey, memory, context=default_context(model), allow_replicated=allowed)
        return planned.survey.plan.numbers or (), fullest(planned, memory)

    shares, filled = group.from_first(fit)
    if filled > 1 and group.rank == 0:
        logger.warning("the model needs %.0f%% of the memory that is free on the fullest rank", 100 * filled)
    return shares, f"{', '.join(map(size, memory))} free, {filled:.0%} needed"


def _by_speed(model: PreTrainedModel, group: TensorParallelGroup) -> tuple[tuple[float, ...], str]:
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
