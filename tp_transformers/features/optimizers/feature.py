"""Optimizers: steps on shards, or on one full parameter at a time, and torch's GradScaler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ...seams import Feature

if TYPE_CHECKING:
    from ...patches import Patch


class Optimizers(Feature):
    """Every optimizer updates shards as it updates full parameters in one process, or is refused."""

    requires: ClassVar[tuple[str, ...]] = ("full_parameters",)

    public: ClassVar[Mapping[str, str]] = {"training.parameter_groups": ".groups"}
    torch_names: ClassVar = {"torch.amp.GradScaler._unscale_grads_": "GradScaler refuses shards"}

    def model_patches(self) -> Sequence[Patch]:
        from .grad_scaler import SHARED_INFINITIES
        from .step import STEPS_ON_SHARDS

        return (STEPS_ON_SHARDS, SHARED_INFINITIES)


FEATURE = Optimizers()
