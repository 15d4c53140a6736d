"""`training.reshard(model, optimizer, 3)`: between two steps, with the states of the optimizer."""

from __future__ import annotations

from typing import Any

import torch

from .reshard import Reshard, To


def reshard(model: Any, optimizer: torch.optim.Optimizer | None, to: To) -> tuple[Any, Any]:
    """Turn a model and its optimizer into the same on other ranks, between two steps. Collective over all ranks.

    As `tp_transformers.reshard`; both are None on a rank that has none yet, or none any more. A rank that had the
    optimizer gets the same object, with the new parameters and states, so that its schedulers go on; a rank that joins
    gets a new one of the class, with the settings of each group.

    Returns the model and the optimizer.

    Raises, on all ranks, before anything is changed, as `tp_transformers.reshard`, and:
        UnsupportedError: the optimizer has states that are neither of the shape of a parameter nor single numbers.
        CheckpointError: a lost rank held the only copy of states.
    """
    return Reshard(model, optimizer, to, None).run()
