"""Norms and dropouts on activations that are cut along the sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..collectives import all_gather_uneven
from ..layout import chunked
from .base import Placements, TensorParallelLayer, as_sharded


class SequenceParallel(TensorParallelLayer):
    """Apply the whole module to this rank's part of the sequence (Korthikanti et al. 2022).

    Parameters are whole; each rank has the part of their gradient that its tokens give (backward: all-reduce). A
    DTensor is redistributed to `Shard(sequence_dim)`; a plain tensor is this rank's part already.

        [x / y] ── n ── [n(x) / n(y)]
    """

    sums_gradients = True

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True, use_dtensor: bool = True) -> None:
        """`sequence_dim`: of the activations, which are (batch, sequence, hidden) by default."""
        self.sequence_dim = sequence_dim
        super().__init__(
            input_layouts=(Shard(sequence_dim),),
            output_layouts=(Shard(sequence_dim),),
            desired_input_layouts=(Shard(sequence_dim),),
            use_local_output=use_local_output,
            use_dtensor=use_dtensor,
        )

    @property
    def takes_sharded_input(self) -> bool:
        """Its features are whole; the sequence is cut."""
        return False

    @property
    def leaves_sharded_output(self) -> bool:
        """Its features are whole; the sequence is cut."""
        return False

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        x, length, strategy = inputs[0], None, mod.tp_strategy
        assert isinstance(strategy, SequenceParallel)
        if isinstance(x, DTensor):
            length = x.shape[strategy.sequence_dim]
            x = x.redistribute(device_mesh, desired_input_layouts).to_local()  # type: ignore[arg-type]
        mod.__dict__["_tp_length"] = length
        return (x, *inputs[1:])

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        length, strategy = mod.__dict__.pop("_tp_length"), mod.tp_strategy
        assert isinstance(strategy, SequenceParallel)
        if use_local_output:
            return outputs
        dim = strategy.sequence_dim % outputs.ndim
        if length is None:
            own = torch.tensor([outputs.shape[dim]], device=outputs.device)
            parts = all_gather_uneven(own, [1] * device_mesh.size(), device_mesh.get_group()).tolist()
            length = sum(parts)
            if tuple(parts) != chunked(length, len(parts)).widths:
                raise ValueError(
                    f"no DTensor placement describes a sequence cut into {parts}; use use_local_output=True"
                )
        return as_sharded(outputs, dim, length, device_mesh)
