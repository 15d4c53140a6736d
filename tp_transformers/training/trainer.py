"""transformers' Trainer, for models that are loaded with `tp_plan`.

Not imported by the package itself: transformers' own takes a second to import.
"""

from __future__ import annotations

from typing import Any

import transformers

from .trainer_patch import TRAINER


class Trainer(transformers.Trainer):
    """transformers' Trainer, which trains tensor-parallel models for as long as it lives, also without `enable()`.

    Gradients are clipped by the norm of the whole model's. Optimizers get groups that do not mix DTensors with plain
    parameters. Values that ranks share and that have drifted apart are brought together at every checkpoint. All ranks
    save the model together. accelerate learns how many ranks share a batch, on CPUs too, where it takes no such number.
    Predictions are gathered from one rank of each copy, with whole logits also under loss parallelism. Everything else
    is transformers'; a model without a plan is trained by it alone.

    With more ranks than the `tp` axis has, the model has to have been through `tp_transformers.data_parallel`.
    Training goes on from a checkpoint on any mesh, and in one process: the optimizer's state, which differs from rank
    to rank, is a distributed checkpoint in it.

    Raises:
        MeshError: where ranks beyond the `tp` axis would train copies of the model that do not meet.
        CheckpointError: where a checkpoint has the state of an optimizer of one process.
        UnsupportedError: where ranks that share a model have batches of their own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        TRAINER.hold_for(self)
        super().__init__(*args, **kwargs)
