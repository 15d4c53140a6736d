"""Averaging of gradients over copies of a model, during the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UnsupportedError
from ...marks import Mark, untyped
from ...ranks import direct
from ...ranks.group import GROUP
from ...strategies import batch_sharded, finish_gradient, local_tensor
from ...torch_api import take, tree_leaves

engine = take("torch.autograd.Variable._execution_engine")
BUCKET = 32 << 20
"""Bytes of gradients in one all-reduce."""
TRAVELLING = 4
"""Maximum number of buckets in flight, which bounds their memory."""

_HOOKED: Mark[int] = Mark("tp_averaged")
"""On a parameter: the id of the `Average` whose hooks it has. A cast of the model drops both."""

T = TypeVar("T", bound=Tensor)


def outside(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters outside the modules that gather the samples of all ranks."""
    inside = {param for module in batch_sharded(model) for param in module.parameters()}
    return [param for param in model.parameters() if param not in inside]


class Average:
    """Average the gradients of a model over its copies, in every backward that reaches a parameter of the model.

    Hooks of the parameters start the average, whichever module or method computed the loss. Hooks of the outputs of
    models start it earlier, so that a backward inside the backward (reentrant checkpoints) does not end it.

    Buckets of gradients are all-reduced during the backward, in the reverse order of the model's parameters, the same
    on all copies: a bucket is sent when its gradients are complete and all earlier buckets were sent (Li et al. 2020,
    "PyTorch Distributed", section 3.2.3). Buckets hold the parameters that had a gradient on any copy in the previous
    backward. At the end the copies agree on the parameters with a gradient in this backward (one all-reduce of a number
    a parameter), so that experts without tokens on some copies cannot desynchronise them; then the rest is averaged.

    Averaging is idempotent, so gradients may accumulate over several backwards, and may arrive in several steps, as in
    a module that is checkpointed twice. Parameters that were added since the last forward take the first copy's values.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, sharing: dist.ProcessGroup | None, reduce_dtype: torch.dtype | None
    ) -> None:
        self.process_group = process_group
        self.reduce_dtype = reduce_dtype
        self.sharing = sharing
        """The ranks that share a copy, if they have different batches; else None."""
        self.enabled = True
        self._model: Callable[[], nn.Module | None] = _no_model
        self._end: Callable[[], object] = _no_model
        """Weak reference to the callback at the end of the backward; the engine drops it with a backward that fails."""
        self._buckets: list[list[nn.Parameter]] = []
        self._next = 0
        """Number of buckets sent in this backward."""
        self._sent: set[nn.Parameter] = set()
        """The parameters of the buckets that were sent."""
        self._in_flight: list[tuple[list[nn.Parameter], Tensor, dist.Work]] = []
        """Buckets in flight with their concatenated gradients; zeros for parameters without one."""
        self._arrived: set[nn.Parameter] = set()
        self._late: set[nn.Parameter] = set()
        """Parameters with a gradient that arrived after their bucket was sent."""
        self._means: dict[nn.Parameter, Tensor] = {}
        """Mean gradients of parameters without a gradient on this copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Average:
        copied = Average(self.process_group, self.sharing, self.reduce_dtype)
        model = memo.get(id(self._model()))
        copied._model = _no_model if model is None else weakref.ref(model)
        return copied

    def follow(self, model: nn.Module) -> None:
        """Average the gradients of `model` from now on."""
        self._model = weakref.ref(model)
        for module in model.modules():
            if GROUP.name in module.__dict__:
                module.register_forward_pre_hook(self._welcome)
                module.register_forward_hook(self._watch)
        self._hook(model)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether a backward averages gradients, including those accumulated before without averaging."""
        self.enabled = requires_gradient_sync

    def _hook(self, model: nn.Module) -> list[nn.Parameter]:
        """Register the hooks of the model's parameters that have none; return these parameters."""
        params = [param for param in model.parameters() if param.requires_grad and param.is_leaf]
        new = [param for param in params if _HOOKED.find(param) != id(self)]
        for param in new:
            _HOOKED.put(param, id(self))
            param.register_hook(partial(self._before, param))
            param.register_post_accumulate_grad_hook(self._after)
        return new

    def _welcome(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook: give parameters that were added the first copy's values, and hooks."""
        model = self._model()
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or model is None:
            return
        new = [param for param in self._hook(model) if isinstance(param, nn.Parameter)]
        if new and self.sharing is not None:
            alone = set(outside(model))
            broadcast((param for param in new if param in alone), self.sharing)
        broadcast(new, self.process_group)

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: register hooks on the outputs that start averaging when a backward begins."""
        if not torch.is_grad_enabled():
            return

        def on_backward(grad: Tensor) -> None:
            self._begin()

        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(on_backward)

    @property
    def is_queued(self) -> bool:
        """True from the begin of a backward that averages gradients to the end of that backward."""
        return self._end() is not None

    def _begin(self) -> None:
        """Average the gradients of the backward that is running, if that has not begun."""
        if not self.enabled or self.is_queued:
            return
        self._next = 0
        for container in (self._sent, self._in_flight, self._arrived, self._late, self._means):
            container.clear()
        end = partial(self._finish)
        self._end = weakref.ref(end)
        engine.queue_callback(end)

    def _before(self, param: nn.Parameter, grad: Tensor) -> None:
        """Before a gradient is accumulated: if its bucket was sent, receive the mean first."""
        if self.is_queued and param in self._sent:
            self._late.add(param)
            while self._in_flight:
                self._receive()

    def _after(self, param: Tensor) -> None:
        """After a gradient was accumulated: send complete buckets."""
        if not self.enabled:
            return
        self._begin()
        if len(untyped(param)._post_accumulate_grad_hooks) > 1:
            raise UnsupportedError(
                'register_post_accumulate_grad_hook under data_parallel(mode="replicate")',
                got="a hook of a parameter, which would see the gradient of one copy",
                expected="code that reads the mean over the copies",
                fix='Read `param.grad` after the backward, or pass mode="shard".',
            )
        finish_gradient(param)
        self._arrived.add(untyped(param))
        while self._next < len(self._buckets) and self._arrived.issuperset(self._buckets[self._next]):
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Start the all-reduce of the next bucket; wait for the oldest if too many are in flight."""
        if len(self._in_flight) == TRAVELLING:
            self._receive()
        bucket = self._buckets[self._next]
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in bucket]
        flat = torch.cat([local_tensor(grad).reshape(-1) for grad in grads]).to(self.reduce_dtype or grads[0].dtype)
        # Not through shared memory: a rank would wait there for copies that are in a collective of their tp ranks.
        work = dist.all_reduce(flat, group=self.process_group, async_op=True)
        assert work is not None
        self._in_flight.append((bucket, flat, work))
        self._sent.update(bucket)
        self._next += 1

    @torch.no_grad()
    def _receive(self) -> None:
        """Wait for the oldest bucket, and write its means to `.grad`, or to `_means` for parameters without one."""
        bucket, flat, work = self._in_flight.pop(0)
        work.wait()
        flat /= self.process_group.size()
        for param, mean in zip(bucket, flat.split([local_tensor(param).numel() for param in bucket]), strict=True):
            if param.grad is None:
                self._means[param] = mean.clone()
            else:
                local_tensor(param.grad).copy_(mean.view(local_tensor(param.grad).shape))

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of a backward: average all remaining gradients that exist on any copy."""
        self._end, module = _no_model, self._model()
        if module is None:
            return
        if not self._arrived.issubset(module.parameters()):
            raise UnsupportedError(
                'a backward under data_parallel(mode="replicate")',
                got="gradients of tensors that stood in for parameters of the model, as in torch.func.functional_call",
                expected="gradients of the parameters of the model, which are averaged over the copies",
                fix="Compute these tensors from the parameters, or take torch.autograd.grad and average that yourself.",
            )
        while self._next < len(self._buckets):
            self._send()
        while self._in_flight:
            self._receive()
        params = [param for param in module.parameters() if param.requires_grad]
        sent = self._sent - self._late
        state = [0 if param.grad is None else 1 if param in sent else 2 for param in params]
        agreed = torch.tensor(state, dtype=torch.float, device=params[0].device)
        for process_group in filter(None, (self.process_group, self.sharing)):
            direct.all_reduce(agreed, process_group, direct.MAX)
        states = dict(zip(params, agreed.tolist(), strict=True))
        with_grad = [param for param in params if states[param]]
        rest = [param for param in with_grad if states[param] == 2]
        for param in with_grad:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
                if param in self._means:
                    local_tensor(param.grad).view(-1).copy_(self._means[param])
            finish_gradient(param)
        self._means.clear()
        alone = set(outside(module)) if self.sharing is not None else set()
        for process_groups, group_params in (
            ((self.sharing, self.process_group), [param for param in rest if param in alone]),
            ((self.process_group,), [param for param in rest if param not in alone]),
        ):
            _average(group_params, process_groups, self.reduce_dtype)
        bucketed = [param for param in reversed(with_grad) if param not in alone]
        self._buckets = list(_buckets(bucketed))


def _no_model() -> None:
    """Stand in for a weak reference to nothing."""


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], process_group: dist.ProcessGroup | None) -> None:
    """Broadcast `tensors` from the group's first rank."""
    for tensor in tensors:
        local = local_tensor(tensor)
        for dim, stride in enumerate(local.stride()):
            if stride == 0:  # expanded: one value, read several times
                local = local.narrow(dim, 0, min(1, local.shape[dim]))
        sent = local.contiguous()
        is_short = sent.ndim and sent.element_size() == 1  # float8 and bool, which some backends cannot send
        direct.broadcast(sent.view(torch.uint8) if is_short else sent, process_group, 0)
        if sent is not local:
            local.copy_(sent)


def _average(
    params: Iterable[nn.Parameter],
    process_groups: Iterable[dist.ProcessGroup | None],
    reduce_dtype: torch.dtype | None,
) -> None:
    """Average the gradients of `params` over `process_groups`, one after the other, in place."""
    for bucket in _buckets([local_tensor(param.grad) for param in params if param.grad is not None]):
        flat = torch.cat([grad.reshape(-1) for grad in bucket]).to(reduce_dtype or bucket[0].dtype)
        for process_group in filter(None, process_groups):
            direct.all_reduce(flat, process_group)
            flat /= process_group.size()
        for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(mean.view(grad.shape))


def _buckets(tensors: Iterable[T]) -> Iterator[list[T]]:
    """Yield lists of tensors of one dtype, about BUCKET bytes each."""
    by_dtype: dict[torch.dtype, list[T]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        bucket: list[T] = []
        for tensor in same_dtype:
            bucket.append(tensor)
            if sum(local_tensor(entry).nbytes for entry in bucket) >= BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
