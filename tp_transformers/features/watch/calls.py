"""Failures of one rank in calls of a model: all ranks raise. See `watch.py`.

Watched are forwards, `generate`, backwards, steps of optimizers, and errors that end the process. `fail_together` is
for user code around them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...errors import RemoteRankError
from ...marks import Mark, untyped
from ...patches import Patch, Undo, nothing, replace
from ...ranks.group import GROUP, TensorParallelGroup
from ...strategies import batch_sharded
from ...strategies.shards.shard import SHARD
from ...torch_api import take, untraced
from .device import Steps
from .failure import FAILURE
from .poller import POLLER
from .sockets import store_of_ranks
from .watch import LIMIT, Watch, watched, watched_ranks, watches

WATCH: Mark[Watch] = Mark("tp_watch")
"""The watch for failures of other ranks, on a model and on the models inside it."""


_LOADING: ContextVar[Watch | None] = ContextVar("tp_transformers_loading", default=None)
"""The watch of the load that runs."""


@contextmanager
def load_watched(group: TensorParallelGroup, limit: bool | float | None) -> Iterator[None]:
    """Watch a load on the ranks of `group`; its model is given to `keep_watching`.

    Collective. Nothing is watched on one rank, and with a custom store. Either all ranks pass `limit=False`, or none.

    Args:
        limit: seconds until a silent rank counts as lost; None and True for `LIMIT`, False for no watch at all.
    """
    if group.size == 1 or limit is False or store_of_ranks() is None:
        yield
        return
    watching = Watch(group, LIMIT if limit is None or limit is True else limit)
    for patch in WATCHED_CALLS:
        patch.hold_for(watching)
    with watching:
        token = _LOADING.set(watching)
        try:
            yield
        finally:
            _LOADING.reset(token)


def keep_watching(model: nn.Module) -> None:
    """Watch the calls of a model at the end of its load."""
    watching = _LOADING.get()
    if watching is None:
        return
    for module in model.modules():
        if GROUP.find(module) is not None:
            WATCH.put(module, watching)


def watch_copies(model: nn.Module, copies: TensorParallelGroup) -> None:
    """Watch the ranks that hold the same shards in the other copies of `model`, too."""
    own = WATCH.find(model)
    if own is not None and copies.size > 1:
        own.beyond = Watch(copies, own.limit, is_of_copies=True)


def fail_together(model: Any) -> AbstractContextManager[Any]:
    """Context manager for a block that all ranks run: if it fails on some of them, it fails on all, within seconds.

    For code around a tensor-parallel model that may fail on one rank: a step of a training loop, a tokenizer, a metric.
    The rank that fails first raises its own error; the others raise RemoteRankError with its message and traceback, and
    their process group has ended. If all ranks fail in the same way, each raises its own error and can go on.
    """
    return WATCH.find(model) or nullcontext()


def around_call(caller: Any) -> AbstractContextManager[Any]:
    """See `Feature.around_call`."""
    return watched_ranks(caller) if isinstance(caller, TensorParallelGroup) else fail_together(caller)


class WatchedModel:
    """A module with watched outermost calls."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own class, watched."""
        call: Callable[..., Any] = super().__call__  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        watching = WATCH.find(self)
        if watching is None:
            return call(*args, **kwargs)
        with watching:
            # With a batch that is sharded, ranks have batches of their own.
            if watching.compares_calls and not any(batch_sharded(untyped(self))):
                watching.compare_calls(args, kwargs)
            output = call(*args, **kwargs)
        watching.owes_backward |= torch.is_grad_enabled()
        return output


def _backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with watched(watch for watch in POLLER.all() if isinstance(watch, Watch) and watch.owes_backward):
        result = original(*args, **kwargs)
    for watch in POLLER.all():
        if isinstance(watch, Watch):
            watch.owes_backward = False
    return result


def _watched_step(original: Callable[..., Any], step: Callable[..., Any]) -> Any:
    """Wrap the hooked `step` of an optimizer's class in the watches of its process groups."""
    hooked = original(step)

    @wraps(hooked)
    def step_of(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with watched(_watches_of(optimizer)):
            return hooked(optimizer, *args, **kwargs)

    return step_of


def _watches_of(optimizer: Optimizer) -> Iterator[Watch]:
    """The watches of the process groups over which an optimizer's parameters are sharded."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    groups = {id(shard.group): shard.group for param in params if (shard := SHARD.find(param)) is not None}
    for group in groups.values():
        with suppress(RuntimeError):  # the group has been destroyed
            yield from watches(group.process_group)


def _noted(note: Callable[[Steps], None]) -> Any:
    @untraced
    def hook(optimizer: Optimizer, *_: Any) -> None:
        for watch in _watches_of(optimizer):
            note(watch.steps)

    return hook


def _note_steps() -> Undo:
    """Let every optimizer note its steps, also one of a class that had an instance before."""
    begin, end = (
        register_optimizer_step_pre_hook(_noted(Steps.begin)),
        register_optimizer_step_post_hook(_noted(Steps.end)),
    )

    def undo() -> None:
        begin.remove()
        end.remove()

    return undo


def _compiled(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    with fail_together(module):
        return original(module, *args, **kwargs)


def _exit(original: Callable[..., Any], kind: Any, error: BaseException | None, trace: Any) -> Any:
    if isinstance(error, Exception) and FAILURE.find(error) is None:
        for watch in POLLER.all():
            if isinstance(watch, Watch):
                try:
                    watch.report(error)
                except RemoteRankError as remote:  # the reason why a user's own collective was aborted
                    if hasattr(error, "add_note"):  # Python 3.11
                        error.add_note(str(remote))
    original(kind, error, trace)


WATCHED_CALLS = (
    Patch("torch", "backwards", lambda: replace(torch.autograd, "backward", _backward), without=nothing),
    Patch("torch", "steps", lambda: replace(Optimizer, "profile_hook_step", _watched_step), without=nothing),
    Patch("torch", "counts of steps", _note_steps),
    Patch(
        "torch",
        "calls of compiled models",
        lambda: replace(take("torch._dynamo.eval_frame.OptimizedModule"), "__call__", _compiled),
        module="torch._dynamo.eval_frame",  # torch.compile imports it, which takes a second
        without=nothing,
    ),
    Patch("Python", "sys.excepthook", lambda: replace(sys, "excepthook", _exit)),
)
"""Held by every watch: backwards, optimizers created while it lives, compiled models, errors that end a process.

If torch lacks one of these, ranks notice such a failure while they wait in the next collective.
"""
