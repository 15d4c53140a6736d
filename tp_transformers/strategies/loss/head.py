"""The output embedding of a language model with a loss of logits that stay cut along the vocabulary."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from ...ranks.collectives import gather_from_region
from ...ranks.group import TensorParallelGroup
from ..base import TensorParallelLayer
from ..forward.attach import forward_of
from ..linear import ColwiseParallel
from ..replicate import ReplicateParallel
from .cross_entropy import CausalLMLoss


class LossColwiseParallel(ColwiseParallel):
    """Cut the output features; gather them, unless `loss_parallel` on the model has seen labels: the loss needs only
    this rank's part.

        x ──f── [A | B] ── whole, or [xA | xB]
    """

    keeps_part = False
    """True while the output of the forward under way stays this rank's part."""

    def __init__(self, *, use_dtensor: bool = True) -> None:
        """`use_dtensor`: whether shards become DTensors where a placement describes them."""
        super().__init__(output_layouts=Replicate(), use_dtensor=use_dtensor)

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: B keeps this rank's part where the head does."""
        return ReplicateParallel(), LossColwiseParallel()

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if self.keeps_part:
            return outputs
        return super().after(module, outputs, mesh)


class LossParallel(TensorParallelLayer):
    """On a language model: where it is given labels, its loss is computed from each rank's part of the logits.

    A loss function that a user sets on the model gets whole logits.
    """

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        heads, labels = _heads(module), forward_of(module).given.get("labels")
        if labels is not None and isinstance(module.__dict__.get("_loss_function"), CausalLMLoss | None):
            # Anew, since embeddings may have been resized.
            module.loss_function = CausalLMLoss(mesh, heads[0].output_split.widths)  # type: ignore[assignment]
            for head in heads:
                head.keeps_part = True
        return inputs

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        self.interrupted(module, mesh)
        return outputs

    def interrupted(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """See `TensorParallelLayer.interrupted`; called by itself, the head gives whole logits."""
        for head in _heads(module):
            head.keeps_part = False


def whole_logits(model: nn.Module, logits: Tensor) -> Tensor:
    """Gather the logits (backward: own slice) after loss parallelism computed the loss from this rank's part."""
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
