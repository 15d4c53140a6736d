"""Forward of a small model with one rank's heads and widths, in one process without communication.

Weights stay unsharded, and projections return one rank's features. Results of communication (a sum over ranks, a norm
of all heads) are taken from a forward of the unsharded model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...anatomy import features, is_norm
from ...errors import error_text, shorten
from ...plans.bind import Resolution
from ...slices.layout import Layout
from ...strategies.shards.slicing import take
from ..mixers.strategies import has_inputs_first
from ..verify.small_models.trace import Trace, traced

TOLERANCE = 1e-3
"""Maximum relative error of a rank's features in fp32 against the unsharded model."""

Calls = list[tuple[Tensor, Tensor]]
"""The input and the output of every call of a module."""


def misfit(
    model: PreTrainedModel, run: Callable[[PreTrainedModel], object], resolution: Resolution, size: int
) -> str | None:
    """Describe the error of the first of `size` ranks that differs from the unsharded model; None if none does.

    Args:
        model: a small model with weights.
        run: calls a model.
        resolution: of a plan that shards only attention and MLPs of `model`.
    """
    sharded = {name for name, layout in resolution.layouts.items() if layout is not None}
    modules = {name.rpartition(".")[0]: model.get_submodule(name.rpartition(".")[0]) for name in sharded}
    calls: dict[str, Calls] = {name: [] for name in modules}
    with (
        torch.no_grad(),
        _hooked(module.register_forward_hook(partial(_record, calls[name])) for name, module in modules.items()),
    ):
        run(model)
    for rank in _different(resolution, size):
        local = copy.deepcopy(model)
        for name, heads in resolution.attention.items():
            heads.count(local, name, rank)
        trace = Trace()
        try:
            with torch.no_grad(), _hooked(_sharding_hooks(local, resolution, calls, rank)), traced(local, trace):
                run(local)
        except Exception as error:  # a forward may raise any error at such widths
            where = trace.running[-1].name if trace.running else type(model).__name__
            reason = shorten(" ".join(error_text(error).split()), 300)
            return f"one forward of rank {rank}'s shards of {size} fails in {where}: {reason}"
    return None


def _different(resolution: Resolution, size: int) -> list[int]:
    """The first rank for each combination of widths."""
    splits = [layout.split for layout in resolution.layouts.values() if layout is not None]
    widths = [tuple(split.widths[rank] for split in splits) for rank in range(size)]
    return sorted({rank_widths: rank for rank, rank_widths in reversed(list(enumerate(widths)))}.values())


@contextmanager
def _hooked(hooks: Iterator[Any]) -> Iterator[None]:
    """Context that removes hooks on exit."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield


def _record(calls: Calls, module: nn.Module, args: Any, output: Any) -> None:
    if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
        calls.append((args[0].clone(), output.clone()))


def _sharding_hooks(model: nn.Module, resolution: Resolution, calls: Mapping[str, Calls], rank: int) -> Iterator[Any]:
    """Hooks that make modules return and take a rank's features; parameters that attention reads itself are sharded."""
    for name, layout in resolution.layouts.items():
        owner, _, kind = name.rpartition(".")
        module, param = model.get_submodule(owner), model.get_parameter(name)
        if layout is None:
            continue
        norms_all = is_norm(module) and param.ndim == 1
        if features(module) is None and not norms_all:
            module._parameters[kind] = nn.Parameter(take(param.detach(), layout, rank), requires_grad=False)
        elif kind == "weight":
            last = Layout(-1, layout.split)
            takes_sharded = features(module) is not None and (layout.dim % 2 == 0) == has_inputs_first(module)
            if takes_sharded or norms_all:
                yield module.register_forward_pre_hook(partial(_full_input, iter(calls[owner]), last, rank))
            if not takes_sharded:
                yield module.register_forward_hook(lambda _, args, output, last=last: take(output, last, rank))


def _full_input(
    calls: Iterator[tuple[Tensor, Tensor]], layout: Layout, rank: int, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Pre-hook: compare an input with the rank's shard of the recorded input, and return the full recorded input."""
    full, _ = next(calls)
    shard = take(full, layout, rank)
    if args[0].shape != shard.shape:
        raise ValueError(f"its input is {list(args[0].shape)}, not {list(shard.shape)}")
    error = float((args[0] - shard).norm() / shard.norm().clamp_min(torch.finfo(shard.dtype).tiny))
    if not error < TOLERANCE:
        raise ValueError(f"its input is another one (relative error {error:.1e})")
    return (full, *args[1:])
