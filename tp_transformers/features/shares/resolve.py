"""The shares of the ranks of a load: of its arguments, of the environment, as saved, or measured."""

from __future__ import annotations

import os

from transformers import PreTrainedModel

from ...checkpoint.saving.folder import of_copies
from ...loading.request import LoadRequest
from ...logs import get_logger
from ...plans.rules import Plan
from ...ranks.group import TensorParallelGroup
from ...slices.layout import Ranks
from ..command_line.arguments import SHARES, shares_of

logger = get_logger(__name__)


def resolve_shares(
    plan: Plan, model: PreTrainedModel, group: TensorParallelGroup, request: LoadRequest
) -> tuple[tuple[float, ...] | None, str]:
    """The shares of the ranks, numbers that are the same on all ranks, or None for even ones; and their reason.

    The caller's come first, then the environment's, then those of a pre-sharded checkpoint on as many ranks. The name
    of a measure becomes numbers; copies of a model take those of the first copy. Collective over the `tp` axis, and
    over the axes of copies. `model` is on the meta device.

    Raises MeshError if ranks ask for different shares, PlanError for a malformed TP_TRANSFORMERS_SHARES.
    """
    given, reason = request.options.get("tp_shares", plan.shares), ""
    asked: tuple[float, ...] | str | None = tuple(given) if isinstance(given, list) else given
    with group.agree():
        if asked is None and os.environ.get(SHARES):
            asked, reason = shares_of(os.environ[SHARES], subject=SHARES), f"by {SHARES}"
    group.check_same({"tp_shares": asked})
    saved = request.storage.shares
    if asked is None and saved is not None and len(saved) == group.size:
        asked, reason = tuple(saved), "as saved"
    if not isinstance(asked, str) or group.size == 1:
        return None if isinstance(asked, str) else asked, reason
    from .measures import by_memory, by_speed  # imports the planner

    found, measured = (by_memory if asked == "memory" else by_speed)(plan, model, group, request)
    found = of_copies(group, found)[0]
    if group.rank == 0:
        logger.info("tp_shares=%s, by %s: %s", list(found), asked, measured)
    return None if Ranks.of(found).shares is None else found, f"by {asked}: {measured}"
