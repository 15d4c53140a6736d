"""transformers' Trainer, for models that are loaded with `tp_plan`.

Not imported by the package itself: importing transformers' Trainer takes a second.
"""

from __future__ import annotations

from typing import Any

import transformers

from .patch import TRAINER


class Trainer(transformers.Trainer):
    """transformers' Trainer with the changes for tensor-parallel models, also without `enable()`.

    Gradients are clipped by the norm of the full model. Optimizers get groups that do not mix DTensors with plain
    parameters. Replicated values are synchronised at every checkpoint. All ranks save the model together. The `tp` size
    is passed to accelerate, on CPUs too, where accelerate itself rejects it. Predictions are gathered from one rank of
    each copy, with unsharded logits also under loss parallelism. All else, and models without a plan, is unchanged.

    With more ranks than the `tp` axis has, call `tp_transformers.data_parallel` on the model first. A checkpoint can be
    resumed on any mesh and in one process: the optimizer's state is saved in it as a distributed checkpoint.

    Raises:
        MeshError: if there are several copies of the model without `data_parallel`.
        CheckpointError: if a checkpoint has the optimizer state of one process.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        TRAINER.hold_for(self)
        super().__init__(*args, **kwargs)
