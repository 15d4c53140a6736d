"""Output embedding of a language model for a loss computed from logits sharded along the vocabulary."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import forward_of
from ...strategies.linear import ColwiseParallel
from ...strategies.replicate import ReplicateParallel
from .cross_entropy import CausalLMLoss


class LossColwiseParallel(ColwiseParallel):
    """Shard the output features; gather the output, unless `loss_parallel` on the model got labels.

    x ──f── [A | B] ── xAB, or [xA | xB]
    """

    keeps_shard = False
    """True while the current forward leaves its output sharded."""

    def __init__(self, *, use_dtensor: bool = True) -> None:
        """`use_dtensor`: whether shards become DTensors where a placement describes them."""
        super().__init__(output_layouts=Replicate(), use_dtensor=use_dtensor)

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: B leaves its output sharded when the head does."""
        return ReplicateParallel(), LossColwiseParallel()

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if self.keeps_shard:
            return outputs
        return super().after(module, outputs, mesh)


class LossParallel(TensorParallelLayer):
    """On a language model: given labels, compute the loss from each rank's shard of the logits.

    A loss function that the user sets on the model gets unsharded logits, and so does the loss after a head of the
    user's own around the sharded one.
    """

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        heads, labels = _heads(module), forward_of(module).given.get("labels")
        if isinstance(module.__dict__.get("_loss_function"), CausalLMLoss):
            del module._loss_function  # rebuilt in every forward, since embeddings may have been resized
        if heads and labels is not None and module.__dict__.get("_loss_function") is None:
            module.loss_function = CausalLMLoss(mesh, heads[0].output_split.widths)  # type: ignore[assignment]
            for head in heads:
                head.keeps_shard = True
        return inputs

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        self.interrupted(module, mesh)
        return outputs

    def interrupted(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """See `TensorParallelLayer.interrupted`; a head that is called by itself returns unsharded logits."""
        for head in _heads(module):
            head.keeps_shard = False


def _heads(model: nn.Module) -> list[LossColwiseParallel]:
    """Strategies of the output embedding and of its adapter; none in a module that may need all logits."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    if not hasattr(head, "tp_strategy") and type(head).__module__.partition(".")[0] != "peft":
        return []
    strategies = [getattr(module, "tp_strategy", None) for module in head.modules()]
    return [strategy for strategy in strategies if isinstance(strategy, LossColwiseParallel)]
