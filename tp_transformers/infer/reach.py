"""The flow of features between linears: a small model is run once, and gradients show what each input depends on.

The output of every linear and embedding is detached from its past, so that the gradient of one input feature of a
linear ends at the linears that feed it directly. `Link.reaches` is exact: without a dependence the gradient is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..anatomy.linears import features, holds_experts, stacked_experts
from ..anatomy.names import fold_lists
from ..anatomy.norms import is_norm_of_one_tensor
from .experts import Feeds, probe_experts

CHUNK = 64
"""Features whose gradients are computed at once."""


@dataclass(frozen=True)
class Link:
    """Paths from the output features of one module to the input features of a linear, with no linear between."""

    reaches: Tensor
    """bool (output features, input features)."""
    mixes: Tensor
    """bool (output features): True if its value for one token reaches another token, as keys and values do."""

    @property
    def is_dense(self) -> bool:
        """True if most features reach most, as through a residual stream with a norm."""
        return bool(self.reaches.float().mean() > 0.9) and min(self.reaches.shape) > 1


@dataclass
class Flow:
    """The flow of features in a model; names are folded."""

    links: dict[str, dict[str, Link]] = field(default_factory=dict)
    """Linear -> the modules that feed it."""
    between: dict[str, set[str]] = field(default_factory=dict)
    """Linear -> parameters between it and the modules that feed it."""
    tangled: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    """Linear that was not examined -> (parameter of a convolution or the like before it, modules that feed it)."""
    readers: dict[str, set[str]] = field(default_factory=dict)
    """Module -> the linears that it feeds; "" for the model's output."""
    norms: dict[str, str] = field(default_factory=dict)
    """Norm -> the module whose output it normalises; links ignore its mean."""
    biased: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    """Module -> shapes of its keyword arguments that are tensors."""
    experts: dict[str, dict[str, Feeds]] = field(default_factory=dict)
    """Module of merged experts -> its parameters and the features they make or take."""
    outside: set[str] = field(default_factory=set)
    """Modules whose parameters another module's forward reads, so that they have to be plain tensors."""
    ran: set[str] = field(default_factory=set)
    """The linears, embeddings and experts that ran."""


def flow_of(model: PreTrainedModel, run: Callable[[], Any]) -> Flow:
    """Run a model once, and return its flow."""
    flow = Flow(outside=_read_outside(model, run))
    seen = _Seen(model, flow)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(1)
        try:
            output = run()
        finally:
            seen.remove()
        for consumer, x in seen.inputs:
            if consumer not in flow.links and x.requires_grad:  # the first of its name that depends on any module
                _trace(seen, flow, consumer, x)
        _find_readers(seen, flow, output)
        for name, (module, args, kwargs) in seen.experts.items():
            flow.experts[name] = probe_experts(module, args, kwargs)
    return flow


class _Seen:
    """Hooks on a model, and their records."""

    def __init__(self, model: PreTrainedModel, flow: Flow) -> None:
        self.flow = flow
        self.leaves: list[tuple[str, Tensor]] = []
        self.inputs: list[tuple[str, Tensor]] = []
        self.experts: dict[str, tuple[nn.Module, Any, Any]] = {}
        self.outputs: dict[int, tuple[str, Tensor]] = {}
        weights = []
        self.handles = []
        for name, module in model.named_modules():
            folded = fold_lists(model, name)
            if features(module) is not None:
                weights.extend(module.parameters(recurse=False))
                self.handles.append(module.register_forward_hook(self._linear(folded), with_kwargs=True))
            elif holds_experts(module) or stacked_experts(module):
                self.handles.append(module.register_forward_pre_hook(self._experts(folded), with_kwargs=True))
            elif is_norm_of_one_tensor(module):
                self.handles.append(module.register_forward_hook(self._norm(folded)))
            elif name:
                self.handles.append(module.register_forward_pre_hook(self._block(folded), with_kwargs=True))
        known = set(map(id, weights))
        self.others = [
            (fold_lists(model, name), param) for name, param in model.named_parameters() if id(param) not in known
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _linear(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            self.flow.ran.add(name)
            x = args[0] if args else next(iter(kwargs.values()))
            if not isinstance(module, nn.Embedding):
                self.inputs.append((name, x))
            if not isinstance(output, Tensor):  # a router
                return None
            leaf = output.detach().requires_grad_()
            copied = leaf.clone()  # the model may change it in place
            self.leaves.append((name, leaf))
            self.outputs[copied.untyped_storage().data_ptr()] = (name, copied)
            return copied

        return hook

    def _norm(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            source = self.outputs.get(args[0].untyped_storage().data_ptr()) if args else None
            if source is None or not isinstance(output, Tensor):
                return None
            self.flow.norms[name] = source[0]
            return args[0] * module.weight  # without the mean over features, through which each reaches all

        return hook

    def _experts(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.flow.ran.add(name)
            if name not in self.experts:
                self.experts[name] = (
                    module,
                    *tree_map_only(Tensor, lambda value: value.detach().clone(), (args, kwargs)),
                )

        return hook

    def _block(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            shapes = {key: tuple(value.shape) for key, value in kwargs.items() if isinstance(value, Tensor)}
            self.flow.biased.setdefault(name, shapes)

        return hook


def _trace(seen: _Seen, flow: Flow, consumer: str, x: Tensor) -> None:
    """Find the links to one linear, feature by feature."""
    flat = x.reshape(-1, x.shape[-1])
    tensors = [leaf for _, leaf in seen.leaves]
    noise = torch.randn_like(flat)
    found = torch.autograd.grad(
        flat, [*tensors, *(p for _, p in seen.others)], noise, retain_graph=True, allow_unused=True
    )
    fed = [index for index, gradient in enumerate(found[: len(tensors)]) if _is_any(gradient)]
    names = [name for name, _ in seen.others]
    flow.between[consumer] = {
        name for name, gradient in zip(names, found[len(tensors) :], strict=True) if _is_any(gradient)
    }
    links: dict[str, Link] = {}
    sources = [tensors[index] for index in fed]
    tangled = [name for name, param in seen.others if name in flow.between[consumer] and param.ndim > 2]
    if tangled:
        flow.tangled[consumer] = (tangled[0], {seen.leaves[index][0] for index in fed})
    elif fed and not all((first != 0).any(1).all() for first in _features(flat, noise, sources, count=1)):
        everywhere = _features(flat, noise, sources)
        last = _features(flat[-1:], noise[-1:], sources)
        for index, all_rows, last_row in zip(fed, everywhere, last, strict=True):
            name = seen.leaves[index][0]
            reaches = (all_rows != 0).any(1).T  # (output features, input features)
            mixes = (last_row[:, :-1] != 0).any(1).any(0)
            before = links.get(name)
            links[name] = Link(reaches | before.reaches, mixes | before.mixes) if before else Link(reaches, mixes)
    flow.links[consumer] = links


def _features(flat: Tensor, noise: Tensor, sources: list[Tensor], count: int | None = None) -> list[Tensor]:
    """Gradients (n, tokens, features) of every feature of `flat: (rows, n)`, or of the first `count`, for each source.

    They are zero where a feature does not depend on the source's.
    """
    each = torch.diag_embed(noise).transpose(0, 1)[:count]  # (n, rows, n)
    parts = [
        torch.autograd.grad(flat, sources, some, retain_graph=True, is_grads_batched=True) for some in each.split(CHUNK)
    ]
    return [torch.cat(found).flatten(1, -2) for found in zip(*parts, strict=True)]


def _find_readers(seen: _Seen, flow: Flow, output: Any) -> None:
    """Find the linears that every module feeds, and the modules that feed the output."""
    tensors = [leaf for _, leaf in seen.leaves]
    values = output.values() if isinstance(output, ModelOutput | dict) else output
    ends = [("", value) for value in values if isinstance(value, Tensor) and value.requires_grad]
    for reader, x in (*seen.inputs, *ends):
        if x.requires_grad:
            found = torch.autograd.grad(x, tensors, torch.randn_like(x), retain_graph=True, allow_unused=True)
            for (name, _), gradient in zip(seen.leaves, found, strict=True):
                if _is_any(gradient):
                    flow.readers.setdefault(name, set()).add(reader)


class _Reads(TorchFunctionMode):
    """Records the modules that are not `running` and whose parameters (`owners`, by id) something computes with."""

    def __init__(self, owners: Mapping[int, set[str]], running: set[str]) -> None:
        super().__init__()
        self.owners, self.running = owners, running
        self.outside: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):  # rather than its dtype
            for owners in (self.owners.get(id(value), set()) for value in args):
                self.outside |= owners if owners.isdisjoint(self.running) else set()
        return result


def _read_outside(model: PreTrainedModel, run: Callable[[], Any]) -> set[str]:
    """Modules whose parameters something else computes with, as Whisper's encoder does with its positions."""
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


def _is_any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool((gradient != 0).any())
