"""Record of one forward of a small model: inputs and outputs of its modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ...anatomy import CONVOLUTIONS, features, holds_experts, is_norm
from ...torch_api import tree_map_only

TINY = 1e-6
"""Epsilon of the RMS norm that replaces a norm."""


class Seen:
    """Hooks on a model, and their records by folded names."""

    ran: set[str]
    """The linears, embeddings and experts that ran."""
    norms: dict[str, str]
    """Norm -> the module that computes its input."""
    biased: dict[str, dict[str, tuple[int, ...]]]
    """Module -> shapes of its keyword arguments that are tensors."""
    leaves: list[tuple[str, Tensor]]
    """(linear or embedding, its output, detached from the graph before it)."""
    inputs: list[tuple[str, Tensor]]
    """(linear, its input)."""
    others: list[tuple[str, Tensor]]
    """(name, parameter) of all other modules."""
    read: list[tuple[str, Tensor]]
    """(name, tensor): parameters of linears read by another module's forward, buffers of modules with a convolution."""
    experts: dict[str, tuple[nn.Module, Any, Any]]
    """Module of merged experts -> it, and its arguments."""

    def __init__(self, model: PreTrainedModel, outside: set[str]) -> None:
        """Hook the modules of `model`; `outside`: modules with parameters that another module's forward reads."""
        self.ran, self.norms, self.biased, self.experts = set(), {}, {}, {}
        self.leaves, self.inputs, self.read = [], [], []
        self._outputs: dict[int, tuple[str, Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        self._buffers: list[Tensor] = []
        weights: list[nn.Parameter] = []
        for name, module in model.named_modules():
            folded = fold_lists(model, name)
            params = [(f"{folded}.{key}", param) for key, param in module.named_parameters(recurse=False)]
            if features(module) is not None:
                weights += [param for _, param in params]
                self.read += params if folded in outside else []
                self._handles.append(module.register_forward_hook(partial(self._linear, folded), with_kwargs=True))
            elif holds_experts(module) or stacked_experts(module):
                self._handles.append(module.register_forward_pre_hook(partial(self._experts, folded), with_kwargs=True))
            elif is_norm_of_one_tensor(module):
                self._handles.append(module.register_forward_hook(partial(self._norm, folded)))
            elif is_norm(module):  # with a gate
                means = _DetachedMeans()
                self._handles.append(module.register_forward_pre_hook(means.enter))
                self._handles.append(module.register_forward_hook(means.leave, always_call=True))
            elif name:
                self._handles.append(module.register_forward_pre_hook(partial(self._block, folded), with_kwargs=True))
            if any(isinstance(child, CONVOLUTIONS) for child in module.children()):
                floating = [named for named in module.named_buffers(recurse=False) if named[1].is_floating_point()]
                self.read += [(f"{folded}.{key}", buffer.requires_grad_()) for key, buffer in floating]
                self._buffers += [buffer for _, buffer in floating]
        known = set(map(id, weights))
        self.others = [
            (fold_lists(model, name), param) for name, param in model.named_parameters() if id(param) not in known
        ]

    def remove(self) -> None:
        """Remove the hooks; buffers keep requiring gradients until `close`."""
        for handle in self._handles:
            handle.remove()

    def close(self) -> None:
        """Let buffers require no gradients, as before."""
        for buffer in self._buffers:
            buffer.requires_grad_(False)

    def _linear(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self.ran.add(name)
        x = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(module, nn.Embedding):
            self.inputs.append((name, x))
        if not isinstance(output, Tensor):  # a router
            return None
        leaf = output.detach().requires_grad_()
        copied = leaf.clone()  # the model may change it in place
        self.leaves.append((name, leaf))
        self._outputs[copied.untyped_storage().data_ptr()] = (name, copied)
        return copied

    def _norm(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        source = self._outputs.get(args[0].untyped_storage().data_ptr()) if args else None
        if source is None or not isinstance(output, Tensor):
            return None
        self.norms[name] = source[0]
        # Detach the mean, through which every feature reaches all; keep the scale, so that attention is not
        # concentrated on one token.
        squares = args[0].detach().float().square().mean(-1, keepdim=True)
        return args[0] * module.weight * torch.rsqrt(squares + TINY).to(args[0].dtype)

    def _experts(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.ran.add(name)
        if name not in self.experts:
            copied = tree_map_only(Tensor, lambda value: value.detach().clone(), (args, kwargs))
            self.experts[name] = (module, *copied)

    def _block(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        shapes = {key: tuple(value.shape) for key, value in kwargs.items() if isinstance(value, Tensor)}
        self.biased.setdefault(name, shapes)


class _DetachedMeans(TorchFunctionMode):
    """Detaches the means of a norm, through which every feature reaches all."""

    def enter(self, *_: Any) -> None:
        """Forward pre-hook."""
        self.__enter__()

    def leave(self, *_: Any) -> None:
        """Forward hook."""
        self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.detach() if func in (torch.mean, Tensor.mean) else result


class _Reads(TorchFunctionMode):
    """Records modules that are not `running` while a parameter of theirs is used; `owners`: its id -> modules."""

    def __init__(self, owners: Mapping[int, set[str]], running: set[str]) -> None:
        super().__init__()
        self.owners, self.running = owners, running
        self.outside: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):  # not a read of an attribute such as dtype
            for owners in (self.owners.get(id(value), set()) for value in args):
                self.outside |= owners if owners.isdisjoint(self.running) else set()
        return result


def read_outside(model: PreTrainedModel, run: Callable[[], Any]) -> set[str]:
    """Find modules with parameters that other code computes with, as Whisper's encoder with its position embeddings."""
    running: set[str] = set()
    owners: dict[int, set[str]] = {}
    handles = []
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), set()).add(name)
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.add(name)))
        handles.append(module.register_forward_hook(lambda *_, name=name: running.discard(name), always_call=True))
    try:
        with torch.no_grad(), _Reads(owners, running) as reads:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return {fold_lists(model, name) for name in reads.outside}


def stacked_experts(module: nn.Module) -> int:
    """Number of experts whose matrices are concatenated, (experts * features, hidden), in the parameters of a module.

    0 if there are none. DBRX stores experts like this.
    """
    count = vars(module).get("num_experts")
    shapes = [param.shape for param in module.parameters()]
    if not isinstance(count, int) or count < 2 or not shapes or any(features(child) for child in module.modules()):
        return 0
    return count if all(len(shape) == 2 and shape[0] % count == 0 and shape[0] > count for shape in shapes) else 0


def fold_lists(model: nn.Module, name: str) -> str:
    """Replace the indices of module lists in a name by `*`; indices of an nn.Sequential stay, as its modules differ."""
    owner: Any = model
    path = []
    for step in name.split("."):
        path.append("*" if isinstance(owner, nn.ModuleList) and step.isdecimal() else step)
        owner = getattr(owner, step, None)
    return ".".join(path)


def is_norm_of_one_tensor(module: nn.Module) -> bool:
    """True for a norm with one input tensor, no children, and a weight of at most two dims (heads, features)."""
    weight = module._parameters.get("weight")
    return (
        is_norm(module)
        and weight is not None
        and weight.ndim <= 2
        and not list(module.children())
        and len(inspect.signature(type(module).forward).parameters) == 2
    )
