"""Row-parallel linears before ranks that go on with features of their own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...ranks.collectives import copy_to_region
from ..linear import RowwiseParallel
from ..signature import FEATURES, LOCAL, Signature


class InnerRowwiseParallel(RowwiseParallel):
    """As `rowwise`, but the ranks go on with their own features: the gradient of the output is summed, too (backward:
    all-reduce).

        [x | y] ── [A / B] ── xA + yB ──g──f──
    """

    signature = Signature(FEATURES, LOCAL)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return copy_to_region(super().after(module, outputs, mesh), mesh.get_group())
