"""The share of each rank in a load: as the caller says, as saved, or as a feature measures it."""

from __future__ import annotations

import os
from dataclasses import replace

from transformers import PreTrainedModel

from ..logs import get_logger
from ..plans.parse import measures, shares_of
from ..plans.rules import Plan
from ..ranks.group import TP_AXIS, TensorParallelGroup
from ..slices.layout import ranks_of
from .request import LoadRequest

logger = get_logger(__name__)

SHARES = "TP_TRANSFORMERS_SHARES"
"""Environment variable with shares for loads that ask for none: `2,1,1`, or the name of a measure."""


def resolve_shares(
    plan: Plan, model: PreTrainedModel, group: TensorParallelGroup, request: LoadRequest
) -> tuple[Plan, str]:
    """Resolve the shares of the plan: numbers, the same on all ranks, or None; returns also their reason.

    The caller's come first, then the environment's, then those of a pre-sharded checkpoint on as many ranks. The name
    of a measure becomes numbers; copies of a model take those of the first copy. Collective over the `tp` axis, and
    over the axes of copies. `model` is on the meta device.

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
    found, measured = measures()[asked](plan, model, group, request)
    if group.mesh is not None and group.mesh.ndim > 1:
        for axis in (group.mesh[name] for name in group.mesh.mesh_dim_names or () if name != TP_AXIS):
            found = TensorParallelGroup.of_mesh(axis, group.device).gather(found)[0]
    if group.rank == 0:
        logger.info("tp_shares=%s, by %s: %s", list(found), asked, measured)
    is_even = isinstance(ranks_of(found), int)
    return replace(plan, shares=None if is_even else found), f"by {asked}: {measured}"
