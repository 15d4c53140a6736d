"""Row-parallel linears with outputs that feed sharded computation."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...ranks.collectives import copy_to_region
from ...strategies.linear import RowwiseParallel
from ...strategies.signature import FEATURES, LOCAL, Signature


class InnerRowwiseParallel(RowwiseParallel):
    """`rowwise` for an output that each rank uses for other features: its gradient is summed too (backward:
    all-reduce).

        [x | y] ── [A / B] ── xA + yB ──g──f──
    """

    signature = Signature(FEATURES, LOCAL)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return copy_to_region(super().after(module, outputs, mesh), mesh.get_group())
