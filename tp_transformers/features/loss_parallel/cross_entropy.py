"""Cross entropy of logits that are sharded along the vocabulary, without gathering them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.nn.functional import pad

from ...errors import PlanError
from ...ranks import direct
from ...ranks.collectives import Group, all_gather_number, copy_to_region, reduce_from_region
from ...ranks.group import TensorParallelGroup
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import forward_of
from ...strategies.linear import ColwiseParallel
from ...strategies.replicate import ReplicateParallel
from ...torch_api import take

assert_async = take("torch._assert_async")
REDUCTIONS = ("mean", "sum", "none")


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: Group | DeviceMesh | TensorParallelGroup | None,
    *,
    widths: Sequence[int] | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of the unsharded logits from this rank's shard; replicated.

    Communication: two all-reduces of a few numbers a token (the largest logit; the sum of exponentials with the
    target's logit), none in the backward. Computes in fp32 or wider; the gradient has the dtype of the logits.

    Args:
        logits: (..., vocabulary/size), this rank's shard; shards are in rank order.
        target: (...), ids in the full vocabulary, replicated.
        group: a process group, a 1-D DeviceMesh or `model.tp_group`; None for one process.
        widths: vocabulary length of each rank's shard; None: exchange them (one all-gather of a number).
        ignore_index: the id of targets that are ignored.
        reduction: "mean" (over targets that are not ignored), "sum" or "none".

    Raises:
        IndexError: on a CPU, if a target is outside the vocabulary (a GPU and a compiled graph fail an assertion).
        ValueError: for an unknown reduction, or if the shapes do not match.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, not one of {', '.join(REDUCTIONS)}")
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not fit targets of shape {tuple(target.shape)}")
    if isinstance(group, TensorParallelGroup):
        group = group.process_group
    elif isinstance(group, DeviceMesh):
        group = group.get_group()
    if widths is None:
        width = logits.shape[-1]
        widths = (width,) if group is None else all_gather_number(width, group, logits.device)
    is_counted = target != ignore_index
    is_valid = (target >= 0) & (target < sum(widths)) | ~is_counted
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        assert_async(is_valid.all())
    elif not is_valid.all():
        raise IndexError(f"Target {target[~is_valid][0].item()} is out of bounds.")
    start = sum(widths[: dist.get_rank(group)]) if group is not None else 0
    losses: Tensor = _CrossEntropy.apply(logits, target.masked_fill(~is_counted, -1), start, group)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / is_counted.sum()


@dataclass(frozen=True)
class CausalLMLoss:
    """transformers' `ForCausalLMLoss` computed from this rank's shard of the logits, for `model.loss_function`."""

    device_mesh: DeviceMesh
    widths: tuple[int, ...]
    """Vocabulary length of each rank's shard."""

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the loss of `labels`, which are shifted here, or of `shift_labels`, which are shifted already.

        Returns the sum over tokens divided by `num_items_in_batch`, or the mean without it. Raises PlanError if
        `vocab_size` differs from the length of the sharded vocabulary.
        """
        if vocab_size != sum(self.widths):
            raise PlanError(
                "loss_parallel",
                got=f"a loss over {vocab_size} ids",
                expected=f"the {sum(self.widths)} that the output embedding has",
                fix="Load the model without tp_loss_parallel.",
            )
        width, rank = logits.shape[-1], self.device_mesh.get_local_rank()
        if width == vocab_size:  # unsharded, from a call without labels
            logits = logits.narrow(-1, sum(self.widths[:rank]), self.widths[rank])
        if shift_labels is None:
            assert labels is not None
            shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        logits, target = logits.flatten(0, -2), shift_labels.flatten().to(logits.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = vocab_parallel_cross_entropy(
            logits, target, self.device_mesh, widths=self.widths, ignore_index=ignore_index, reduction=reduction
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class _CrossEntropy(torch.autograd.Function):
    """One loss per token. The target is -1 for ignored tokens; `start` is the first id of this rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int, group: Group | None) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # A rank's shard is empty if the vocabulary is smaller than the number of ranks.
        largest = wide.amax(-1) if wide.shape[-1] else wide.new_full(target.shape, -torch.inf)
        direct.all_reduce(largest, group, direct.MAX)
        local_ids, is_local = _local(target, start, wide.shape[-1])
        target_logits = (
            wide.gather(-1, local_ids.unsqueeze(-1)).squeeze(-1) if wide.shape[-1] else wide.new_zeros(target.shape)
        )
        sums = torch.stack([(wide - largest.unsqueeze(-1)).exp_().sum(-1), target_logits.masked_fill(~is_local, 0)])
        direct.all_reduce(sums, group)
        logsumexp = sums[0].log() + largest
        ctx.start, ctx.group = start, group
        ctx.save_for_backward(logits, target, logsumexp)
        return (logsumexp - sums[1]).masked_fill(target < 0, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, logsumexp = ctx.saved_tensors
        is_recorded = torch.is_grad_enabled()  # for double backward
        grad = grads[0].masked_fill(target < 0, 0)
        if is_recorded:
            grad = copy_to_region(grad, ctx.group) if ctx.group is not None else grad
            logsumexp = _recorded_logsumexp(logits, logsumexp, ctx.group)
        wide = logits.to(logsumexp.dtype)
        local_ids, is_local = _local(target, ctx.start, wide.shape[-1])
        grad_logits = (wide - logsumexp.unsqueeze(-1)).exp_()
        grad_logits = grad_logits * grad.unsqueeze(-1) if is_recorded else grad_logits.mul_(grad.unsqueeze(-1))
        if wide.shape[-1]:
            grad_logits.scatter_add_(-1, local_ids.unsqueeze(-1), -grad.masked_fill(~is_local, 0).unsqueeze(-1))
        return grad_logits.to(logits.dtype), None, None, None


def _recorded_logsumexp(logits: Tensor, logsumexp: Tensor, group: Group | None) -> Tensor:
    """Attach a gradient with respect to this rank's logits to `logsumexp`, taken over all ranks."""
    total = (logits.to(logsumexp.dtype) - logsumexp.unsqueeze(-1)).exp().sum(-1)  # sums to 1 over all ranks
    if group is not None:
        total = copy_to_region(reduce_from_region(total, group), group)
    logarithm = total.log()
    return logsumexp + (logarithm - logarithm.detach())


def _local(target: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return (ids relative to this rank's first, 0 for ids of other ranks; mask of this rank's ids)."""
    is_local = (target >= start) & (target < start + width)
    return (target - start).masked_fill(~is_local, 0), is_local


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
