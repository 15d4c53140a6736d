"""Flow of features between linears, from gradients of one forward of a small model.

The output of every linear and embedding is detached, so that the gradient of one input feature of a linear ends at the
linears that feed it directly. `Link.reaches` is exact: without a dependence the gradient is zero. In merged experts, a
change of the slice of a parameter that makes a feature changes one slice of the down projection's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...torch_api import tree_map_only
from ..mixers.counts import first_long_dim
from .seen import Seen, read_outside, stacked_experts

TRIED = 32
"""Number of indices tried along each dim of a parameter."""
ROWS = 2
"""Number of tokens that merged experts are run with; the time grows with the number of chosen experts."""


@dataclass(frozen=True)
class Feeds:
    """Features of the down projection that each index of one parameter along `dim` makes."""

    dim: int
    features: tuple[int | None, ...]
    """Feature that each index along `dim` makes; None if none was seen."""
    width: int


def probe_experts(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Feeds]:
    """Find the features that the parameters of merged experts make or take: {parameter: features}.

    The down projection is the matrix with a gradient that changes in a single slice along a dim for each change of
    another parameter. Without one, the result is empty. `args` and `kwargs`: of the module's forward.
    """
    is_stacked = stacked_experts(module) > 0
    probe = _Probe(module, args, kwargs, is_stacked)
    matrices = {name for name, param in probe.params.items() if param.ndim == 3 or is_stacked}
    for down in (name for name in probe.params if name in matrices):
        for taken in (0,) if is_stacked else (1, 2):
            width = probe.params[down].shape[taken]
            feeds: dict[str, Feeds] = {}
            for name, param in probe.params.items():
                for dim in (0,) if is_stacked else range(1, param.ndim):
                    made = probe.features(name, dim, down, taken) if name != down else ()
                    if any(feature is not None for feature in made):
                        feeds[name] = Feeds(dim, made, width)
            if feeds and matrices <= {*feeds, down}:
                return {**feeds, down: Feeds(taken, tuple(range(width)), width)}
    return {}


class _Probe:
    """Merged experts in fp64, and the gradients that a change of each slice changes."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, is_stacked: bool) -> None:
        self.module = module
        self.params = {name: param.detach().double() for name, param in module.named_parameters()}
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        # Tokens that are sorted by expert come without expert ids; keep all of them.
        all_rows = is_stacked or all(value.is_floating_point() for value in inputs)

        def prepare(value: Tensor) -> Tensor:
            rows = value if all_rows else value[:ROWS]
            return rows.double() if rows.is_floating_point() else rows

        self.args, self.kwargs = tree_map_only(Tensor, prepare, (args, kwargs))
        self.before = self._gradients(self.params)
        self._changes: dict[tuple[str, int, int], dict[str, Tensor]] = {}

    def features(self, name: str, dim: int, down: str, taken: int) -> tuple[int | None, ...]:
        """Index of `down` along `taken` that each index of `name` along `dim` makes; empty if one makes several."""
        length = self.params[name].shape[dim]
        made: list[int | None] = [None] * length
        for index in sorted({*range(min(length, TRIED // 2)), *range(0, length, -(-length // TRIED))}):
            slices = self._changed(name, dim, index)[down].movedim(taken, 0).flatten(1).any(1).nonzero().flatten()
            if len(slices) > 1:
                return ()
            made[index] = int(slices) if len(slices) else None
        return tuple(made)

    def _changed(self, name: str, dim: int, index: int) -> dict[str, Tensor]:
        """Masks of the gradient elements that change with one slice of the parameter `name`."""
        if (name, dim, index) not in self._changes:
            changed = self.params[name].clone()
            changed.select(dim, index).mul_(1.5).add_(0.1)
            after = self._gradients({**self.params, name: changed})
            self._changes[name, dim, index] = {
                key: (after[key] - before).abs() > 1e-9 * before.abs().max() for key, before in self.before.items()
            }
        return self._changes[name, dim, index]

    def _gradients(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        output = torch.func.functional_call(self.module, leaves, self.args, self.kwargs)
        output = output if isinstance(output, Tensor) else output[0]
        weights = torch.linspace(1, 2, output.numel(), dtype=output.dtype).view_as(output)
        gradients = torch.autograd.grad((output * weights).sum(), list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(values[name]) if gradient is None else gradient
            for name, gradient in zip(leaves, gradients, strict=True)
        }


CHUNK = 64
"""Features per batched gradient."""


@dataclass(frozen=True)
class Link:
    """Paths from the output features of one module to the input features of a linear, with no linear between."""

    reaches: Tensor
    """bool (output features, input features)."""
    mixes: Tensor
    """bool (output features): True if its value for one token reaches another token, as keys and values do."""

    @property
    def is_dense(self) -> bool:
        """True if most features reach most others, as through a residual stream with a norm."""
        return bool(self.reaches.float().mean() > 0.9) and min(self.reaches.shape) > 1


@dataclass(frozen=True)
class Mixed:
    """Paths to the input features of a mixer's output projection, from modules inside and before the mixer.

    An element is an output feature of a linear, or an index along the first dim longer than 1 of a parameter or buffer.
    """

    reaches: dict[str, Tensor] = field(default_factory=dict)
    """Linear, parameter or buffer -> bool (elements, input features)."""
    far: dict[str, Tensor] = field(default_factory=dict)
    """Linear -> bool (output features): True if its value for the first token reaches the last token, beyond the
    kernel of a convolution."""


@dataclass
class Flow:
    """Flow of features in a model, by folded names."""

    links: dict[str, dict[str, Link]] = field(default_factory=dict)
    """Linear -> the modules that feed it."""
    between: dict[str, set[str]] = field(default_factory=dict)
    """Linear -> parameters between it and the modules that feed it."""
    unexamined: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    """Linear without links -> (parameter with 3 dims or more before it, as of a convolution; modules that feed it)."""
    mixed: dict[str, Mixed] = field(default_factory=dict)
    """Linear in `unexamined` because of a convolution of its own module -> the paths to it."""
    readers: dict[str, set[str]] = field(default_factory=dict)
    """Module -> the linears that it feeds; "" for the model's output."""
    norms: dict[str, str] = field(default_factory=dict)
    """Norm -> the module that computes its input; links ignore the mean of the norm."""
    biased: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    """Module -> shapes of its keyword arguments that are tensors."""
    experts: dict[str, dict[str, Feeds]] = field(default_factory=dict)
    """Module of merged experts -> parameter -> the features that it makes or takes."""
    outside: set[str] = field(default_factory=set)
    """Modules with parameters that another module's forward reads, so that they must be plain tensors."""
    ran: set[str] = field(default_factory=set)
    """The linears, embeddings and experts that ran."""


def flow_of(model: PreTrainedModel, run: Callable[[], Any]) -> Flow:
    """Run a model once and return its flow."""
    seen = Seen(model, outside := read_outside(model, run))
    flow = Flow(norms=seen.norms, biased=seen.biased, outside=outside, ran=seen.ran)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(1)
        try:
            output = run()
        finally:
            seen.remove()
        for consumer, x in seen.inputs:
            if consumer not in flow.links and x.requires_grad:  # the first call that depends on any module
                _trace(seen, flow, consumer, x)
        _find_readers(seen, flow, output)
        for name, (module, args, kwargs) in seen.experts.items():
            flow.experts[name] = probe_experts(module, args, kwargs)
    seen.close()
    return flow


def _trace(seen: Seen, flow: Flow, consumer: str, x: Tensor) -> None:
    """Find the links to one linear, feature by feature."""
    flat = x.reshape(-1, x.shape[-1])
    tensors = [leaf for _, leaf in seen.leaves]
    noise = torch.randn_like(flat)
    gradients = torch.autograd.grad(
        flat, [*tensors, *(p for _, p in seen.others)], noise, retain_graph=True, allow_unused=True
    )
    feeding = [index for index, gradient in enumerate(gradients[: len(tensors)]) if _is_any(gradient)]
    names = [name for name, _ in seen.others]
    flow.between[consumer] = {
        name for name, gradient in zip(names, gradients[len(tensors) :], strict=True) if _is_any(gradient)
    }
    links: dict[str, Link] = {}
    sources = [tensors[index] for index in feeding]
    unexamined = [name for name, param in seen.others if name in flow.between[consumer] and param.ndim > 2]
    if unexamined:
        flow.unexamined[consumer] = (unexamined[0], {seen.leaves[index][0] for index in feeding})
        owner = consumer.rpartition(".")[0]
        if any(name.startswith(f"{owner}.") for name in unexamined):
            flow.mixed[consumer] = _mixed(seen, flow, consumer, x)
    elif feeding and not all((first != 0).any(1).all() for first in _features(flat, noise, sources, count=1)):
        everywhere = _features(flat, noise, sources)
        last = _features(flat[-1:], noise[-1:], sources)
        for index, all_rows, last_row in zip(feeding, everywhere, last, strict=True):
            name = seen.leaves[index][0]
            reaches = (all_rows != 0).any(1).T  # (output features, input features)
            mixes = (last_row[:, :-1] != 0).any(1).any(0)
            previous = links.get(name)
            links[name] = Link(reaches | previous.reaches, mixes | previous.mixes) if previous else Link(reaches, mixes)
    flow.links[consumer] = links


def _mixed(seen: Seen, flow: Flow, consumer: str, x: Tensor) -> Mixed:
    """Find the paths to the input `x: (batch, tokens, features)` of a linear in a mixer, feature by feature."""
    leaf_count, params = len(seen.leaves), [entry for entry in seen.others if entry[0] in flow.between[consumer]]
    targets = [*seen.leaves, *params, *seen.read]
    dims = [
        tensor.ndim - 1 if at < leaf_count else first_long_dim(tensor.shape) for at, (_, tensor) in enumerate(targets)
    ]
    mixed, noise = Mixed(), torch.randn_like(x)
    for feature in range(x.shape[-1]):
        for is_last, rows in enumerate((slice(None, -1), slice(-1, None))):
            gradients = torch.autograd.grad(
                x[:, rows, feature],
                [target for _, target in targets],
                noise[:, rows, feature],
                retain_graph=True,
                allow_unused=True,
            )
            for at, ((name, _), dim, gradient) in enumerate(zip(targets, dims, gradients, strict=True)):
                if gradient is None or not gradient.any():
                    continue
                touched = gradient.movedim(dim, 0) != 0
                none = torch.zeros(len(touched), x.shape[-1], dtype=torch.bool)
                mixed.reaches.setdefault(name, none)[:, feature] |= (
                    touched.flatten(start_dim=1).any(1) if touched.ndim > 1 else touched
                )
                if at < leaf_count:
                    far = mixed.far.setdefault(name, torch.zeros(len(touched), dtype=torch.bool))
                    far |= touched[..., 0].flatten(1).any(1) if is_last and touched.ndim == 3 else False
    return mixed


def _features(flat: Tensor, noise: Tensor, sources: list[Tensor], count: int | None = None) -> list[Tensor]:
    """Gradients (n, tokens, features) of every feature of `flat: (rows, n)`, or of the first `count`, by source.

    A gradient is zero if a feature does not depend on the feature of the source.
    """
    grad_outputs = torch.diag_embed(noise).transpose(0, 1)[:count]  # (n, rows, n)
    chunks = [
        torch.autograd.grad(flat, sources, chunk, retain_graph=True, is_grads_batched=True)
        for chunk in grad_outputs.split(CHUNK)
    ]
    return [torch.cat(source_gradients).flatten(1, -2) for source_gradients in zip(*chunks, strict=True)]


def _find_readers(seen: Seen, flow: Flow, output: Any) -> None:
    """Find the linears that every module feeds, and the modules that feed the output."""
    tensors = [leaf for _, leaf in seen.leaves]
    values = output.values() if isinstance(output, ModelOutput | dict) else output
    ends = [("", value) for value in values if isinstance(value, Tensor) and value.requires_grad]
    for reader, x in (*seen.inputs, *ends):
        if x.requires_grad:
            gradients = torch.autograd.grad(x, tensors, torch.randn_like(x), retain_graph=True, allow_unused=True)
            for (name, _), gradient in zip(seen.leaves, gradients, strict=True):
                if _is_any(gradient):
                    flow.readers.setdefault(name, set()).add(reader)


def _is_any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool((gradient != 0).any())
