"""Gradients of a model's copies, averaged at the end of a backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from ..strategies import batch_sharded, local_tensor, settle_gradient

BUCKET = 32 << 20
"""Bytes of gradients that travel together."""


def outside(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that no module holds which gathers the batches of all ranks."""
    inside = {param for module in batch_sharded(model) for param in module.parameters()}
    return [param for param in model.parameters() if param not in inside]


class Average:
    """Averages the gradients of a model over its copies, once at the end of every backward from its outputs.

    The copies first agree on the parameters that have a gradient (one all-reduce of a number a parameter), so that
    experts which got no token on some copies keep the ranks together. To average once more what is average changes
    nothing, so gradients may add up over several backwards.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, sharing: dist.ProcessGroup | None, reduce_dtype: torch.dtype | None
    ) -> None:
        self.process_group = process_group
        self.reduce_dtype = reduce_dtype
        self.sharing = sharing
        """The ranks that share a copy, where each has a batch of its own; else None."""
        self.enabled = True
        self.is_queued = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Average:
        return Average(self.process_group, self.sharing, self.reduce_dtype)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """True if a backward averages the gradients, those included that added up without."""
        self.enabled = requires_gradient_sync

    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """After a forward: hear of the backward that begins at any of its outputs."""
        self.is_queued = False  # a backward that failed has not come to its end
        if not torch.is_grad_enabled():
            return

        def begun(grad: Tensor) -> None:
            if self.enabled and not self.is_queued:
                self.is_queued = True
                Variable._execution_engine.queue_callback(partial(self.average, module))

        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(begun)

    @torch.no_grad()
    def average(self, module: nn.Module) -> None:
        """Average what any copy has a gradient of."""
        self.is_queued = False
        params = [param for param in module.parameters() if param.requires_grad]
        has_grad = torch.tensor([float(param.grad is not None) for param in params], device=params[0].device)
        for process_group in filter(None, (self.process_group, self.sharing)):
            dist.all_reduce(has_grad, dist.ReduceOp.MAX, group=process_group)
        found = [param for param, anywhere in zip(params, has_grad.tolist(), strict=True) if anywhere]
        for param in found:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            settle_gradient(param)
        alone = set(outside(module)) if self.sharing is not None else set()
        for process_groups, params in (
            ((self.sharing, self.process_group), [param for param in found if param in alone]),
            ((self.process_group,), [param for param in found if param not in alone]),
        ):
            _average(params, process_groups, self.reduce_dtype)


def _average(
    params: Iterable[nn.Parameter],
    process_groups: Iterable[dist.ProcessGroup | None],
    reduce_dtype: torch.dtype | None,
) -> None:
    """Average the gradients of `params` over `process_groups`, one after the other, in place."""
    for bucket in _buckets([local_tensor(param.grad) for param in params if param.grad is not None]):
        flat = torch.cat([grad.reshape(-1) for grad in bucket]).to(reduce_dtype or bucket[0].dtype)
        for process_group in filter(None, process_groups):
            dist.all_reduce(flat, group=process_group)
            flat /= process_group.size()
        for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(mean.view(grad.shape))


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, about BUCKET bytes at a time."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault(grad.dtype, []).append(grad)
    for tensors in kinds.values():
        bucket: list[Tensor] = []
        for tensor in tensors:
            bucket.append(tensor)
            if sum(held.nbytes for held in bucket) >= BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
