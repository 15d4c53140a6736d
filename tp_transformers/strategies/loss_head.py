"""The output embedding of a language model whose loss is computed from logits that stay cut along the vocabulary."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from ..marks import untyped
from ..ranks.collectives import gather_from_region
from ..ranks.group import TensorParallelGroup
from .attach import forward_of
from .base import Placements, TensorParallelLayer
from .cross_entropy import CausalLMLoss
from .linear import ColwiseParallel


class LossColwiseParallel(ColwiseParallel):
    """Cut the output features; gather them, unless `loss_parallel` on the model has seen labels, whose loss needs only
    this rank's part.

        x ──f── [A | B] ── whole, or [xA | xB]
    """

    keeps_part = False
    """Whether the output of the forward that is under way stays this rank's part."""

    def __init__(self, *, use_dtensor: bool = True) -> None:
        """`use_dtensor`: whether shards become DTensors where a placement describes them."""
        super().__init__(output_layouts=Replicate(), use_dtensor=use_dtensor)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        strategy = mod.tp_strategy
        assert isinstance(strategy, LossColwiseParallel)
        if strategy.keeps_part:
            return outputs
        return ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)


class LossParallel(TensorParallelLayer):
    """On a language model: where it is given labels, its loss is computed from each rank's part of the logits.

    A loss function that a user sets on the model gets whole logits.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        heads, labels = _heads(mod), forward_of(mod).given.get("labels")
        if labels is not None and isinstance(mod.__dict__.get("_loss_function"), CausalLMLoss | None):
            # Anew, since embeddings may have been resized.
            mod.loss_function = CausalLMLoss(device_mesh, heads[0].output_split.widths)  # type: ignore[assignment]
            for head in heads:
                head.keeps_part = True
        return inputs

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        untyped(mod).tp_strategy.interrupted(mod)
        return outputs

    def interrupted(self, module: nn.Module) -> None:
        """See `TensorParallelLayer.interrupted`; called by itself, the head gives whole logits."""
        for head in _heads(module):
            head.keeps_part = False


def whole_logits(model: nn.Module, logits: Tensor) -> Tensor:
    """The logits of all ranks (all-gather; backward: own slice), of whose loss was computed from this rank's part."""
    for head in _heads(model)[:1]:
        group = model.tp_group
        assert isinstance(group, TensorParallelGroup)
        if group.process_group is not None and logits.shape[-1] != head.output_split.length:
            return gather_from_region(logits, head.output_split.widths, group.process_group)
    return logits


def _heads(model: nn.Module) -> list[LossColwiseParallel]:
    """The strategies of the output embedding, and of an adapter's part of it."""
    modules = model.get_output_embeddings().modules()  # type: ignore[operator]
    strategies = [getattr(module, "tp_strategy", None) for module in modules]
    return [strategy for strategy in strategies if isinstance(strategy, LossColwiseParallel)]
