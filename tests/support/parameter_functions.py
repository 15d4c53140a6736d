"""Other people's functions of parameters: of `torch.nn.init`, of `torch.nn.utils`, and torch's own.

Each is called with a module, its input and the name of its parameter, in one process and on each rank; it returns
tensors or numbers, and may change the module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune


class Weighted(nn.Module):
    """Any module with a weight. Only annotations name this class."""

    weight: nn.Parameter


Function = Callable[[Weighted, Tensor], Any]

DIRECT = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
"""Functions of `torch.nn.init` in place."""
_INIT_OPTIONS: dict[str, dict[str, Any]] = {"constant_": {"val": 0.3}, "sparse_": {"sparsity": 0.4}}


def init_functions() -> Iterator[tuple[str, Function]]:
    """Every function of `torch.nn.init` that fills a tensor."""
    for name in DIRECT:
        yield f"init.{name}", _init(name)
    yield "init.normal_ of .data", lambda module, x: nn.init.normal_(module.weight.data).sum()


def _init(name: str) -> Function:
    def run(module: Weighted, x: Tensor) -> None:
        getattr(nn.init, name)(module.weight, **_INIT_OPTIONS.get(name, {}))

    return run


def _backward(module: nn.Module, x: Tensor) -> None:
    module(x).pow(3).mean().backward()


def _grads(module: nn.Module) -> list[Any]:
    """The gradients of all parameters, after a backward."""
    return [param.grad for param in module.parameters()]


def _grad(module: Weighted) -> Any:
    return module.weight.grad


def _with_grad(function: Function) -> Function:
    def run(module: Weighted, x: Tensor) -> Any:
        _backward(module, x)
        result = function(module, x)
        return result, module.weight.grad

    return run


def _forward_of(change: Callable[[Weighted], Any]) -> Function:
    """The output of the module once it is changed, and the gradients of all its parameters."""

    def run(module: Weighted, x: Tensor) -> Any:
        change(module)
        with torch.no_grad():
            inference = module(x)
        output = module(x)
        output.pow(3).mean().backward()
        return inference, output, [param.grad for _, param in sorted(module.named_parameters())]

    return run


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + 0.5 * x.tril(-1) if x.ndim > 1 else x.cumsum(0)


class _Shifted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + x.mean()


class _LowRank(nn.Module):
    """A matrix of low rank of its own, added to the parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(-1, 1, 2 * weight.shape[-1]).view(2, -1))
        self.b = nn.Parameter(torch.linspace(1, 2, 2 * weight.shape[:-1].numel()).view(*weight.shape[:-1], 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b @ self.a


def _cached(module: Weighted, x: Tensor) -> Any:
    parametrize.register_parametrization(module, "weight", _Shifted())
    with parametrize.cached():
        outputs = module(x), module(x), module.weight
    loss: Any = sum(output.pow(3).mean() for output in outputs)
    loss.backward()
    return outputs, _grads(module)


def _compiled(module: nn.Module, x: Tensor) -> Any:
    parametrize.register_parametrization(module, "weight", _Shifted())
    output = torch.compile(module, backend="eager")(x)
    output.pow(3).mean().backward()
    return output, _grads(module)


def _to_vector(module: nn.Module, x: Tensor) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters())


def _from_vector(module: nn.Module, x: Tensor) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, len(vector)), module.parameters())


def _removed(module: nn.Module, apply: Callable[[nn.Module], Any], remove: Callable[[nn.Module], Any]) -> None:
    apply(module)
    remove(module)


UTILS: dict[str, Function] = {
    "clip_grad_norm": _with_grad(lambda m, x: nn.utils.clip_grad_norm(m.parameters(), 0.1)),
    "clip_grad_norm_": _with_grad(lambda m, x: nn.utils.clip_grad_norm_(m.parameters(), 0.1)),
    "clip_grad_norm_ inf": _with_grad(lambda m, x: nn.utils.clip_grad_norm_(m.parameters(), 0.1, float("inf"))),
    "clip_grads_with_norm_": _with_grad(
        lambda m, x: nn.utils.clip_grads_with_norm_(m.parameters(), 0.1, torch.tensor(3.0))
    ),
    "clip_grad_value_": _with_grad(lambda m, x: nn.utils.clip_grad_value_(m.parameters(), 0.05)),
    "clip_grad_value_ foreach": _with_grad(lambda m, x: nn.utils.clip_grad_value_(m.parameters(), 0.05, foreach=True)),
    "get_total_norm": _with_grad(lambda m, x: nn.utils.get_total_norm(_grads(m))),
    "get_total_norm 1": _with_grad(lambda m, x: nn.utils.get_total_norm(_grads(m), 1.0)),
    "get_total_norm inf": _with_grad(lambda m, x: nn.utils.get_total_norm(_grads(m), float("inf"))),
    "get_total_norm foreach": _with_grad(lambda m, x: nn.utils.get_total_norm(_grads(m), foreach=True)),
    "parameters_to_vector": _to_vector,
    "vector_to_parameters": _from_vector,
    "parametrize.register_parametrization": _forward_of(
        lambda m: parametrize.register_parametrization(m, "weight", _Symmetric())
    ),
    "parametrize.register_parametrization +": _forward_of(
        lambda m: parametrize.register_parametrization(m, "weight", _Shifted())
    ),
    "parametrize.register_parametrization B A": _forward_of(
        lambda m: parametrize.register_parametrization(m, "weight", _LowRank(m.weight))
    ),
    "parametrize.cached": _cached,
    "parametrize, torch.compile": _compiled,
    "parametrize.remove_parametrizations": _forward_of(
        lambda m: _removed(
            m,
            lambda m: parametrize.register_parametrization(m, "weight", _Symmetric()),
            lambda m: parametrize.remove_parametrizations(m, "weight"),
        )
    ),
    "parametrizations.weight_norm": _forward_of(parametrizations.weight_norm),
    "parametrizations.orthogonal": _forward_of(lambda m: parametrizations.orthogonal(m, "weight")),
    "parametrizations.spectral_norm": _forward_of(parametrizations.spectral_norm),
    "weight_norm": _forward_of(nn.utils.weight_norm),
    "remove_weight_norm": _forward_of(lambda m: _removed(m, nn.utils.weight_norm, nn.utils.remove_weight_norm)),
    "spectral_norm": _forward_of(nn.utils.spectral_norm),
    "remove_spectral_norm": _forward_of(lambda m: _removed(m, nn.utils.spectral_norm, nn.utils.remove_spectral_norm)),
    "prune.l1_unstructured": _forward_of(lambda m: prune.l1_unstructured(m, "weight", 0.3)),
    "prune.random_unstructured": _forward_of(lambda m: prune.random_unstructured(m, "weight", 0.3)),
    "prune.ln_structured": _forward_of(lambda m: prune.ln_structured(m, "weight", 0.25, 2, dim=0)),
    "prune.random_structured": _forward_of(lambda m: prune.random_structured(m, "weight", 0.25, dim=-1)),
    "prune.global_unstructured": _forward_of(
        lambda m: prune.global_unstructured([(m, "weight")], prune.L1Unstructured, amount=0.3)
    ),
    "prune.custom_from_mask": _forward_of(
        lambda m: prune.custom_from_mask(m, "weight", torch.arange(m.weight.numel()).view(m.weight.shape) % 3 > 0)
    ),
    "prune.remove": _forward_of(
        lambda m: _removed(m, lambda m: prune.l1_unstructured(m, "weight", 0.3), lambda m: prune.remove(m, "weight"))
    ),
    "stateless.functional_call": lambda m, x: nn.utils.stateless.functional_call(
        m, {"weight": (m.weight * 2).detach()}, (x,)
    ),
}
"""By name, each function of `torch.nn.utils` that is given parameters or their gradients."""

OF_OTHERS = frozenset(
    (
        "convert_conv2d_weight_memory_format",  # of convolutions
        "convert_conv3d_weight_memory_format",
        "fuse_conv_bn_eval",  # with a batch norm
        "fuse_conv_bn_weights",
        "fuse_linear_bn_eval",
        "fuse_linear_bn_weights",
        "parametrizations",  # modules, in which functions have rows of their own
        "parametrize",
        "rnn",
        "skip_init",  # makes a module
        "stateless",
    )
)
"""Names of `torch.nn.utils` that have no row of their own."""


def _in_place(change: Callable[[Tensor], Any]) -> Function:
    def run(module: Weighted, x: Tensor) -> None:
        with torch.no_grad():
            change(module.weight)

    return run


def _assign(module: Weighted, x: Tensor) -> Any:
    module.weight.data = torch.linspace(-1, 1, module.weight.numel()).view(module.weight.shape)
    return module(x)


def _gradient_of(loss: Callable[[Tensor], Tensor]) -> Function:
    def run(module: Weighted, x: Tensor) -> Any:
        found = loss(module.weight)
        found.backward()
        return found, module.weight.grad

    return run


def _full_of(weight: Tensor) -> Tensor:
    return torch.linspace(-1, 1, weight.numel()).view(weight.shape)


def _hooked(hook: Callable[[Tensor], Tensor]) -> Function:
    def run(module: Weighted, x: Tensor) -> Any:
        module.weight.register_hook(hook)
        _backward(module, x)
        _backward(module, x)
        return module.weight.grad

    return run


def _perturb(module: nn.Module, x: Tensor) -> Any:
    """A step of MeZO (Malladi et al. 2023)."""
    for scale in (1, -2, 1):
        torch.manual_seed(3)
        for param in module.parameters():
            noise = torch.normal(
                mean=0, std=1, size=param.data.size(), device=param.data.device, dtype=param.data.dtype
            )
            param.data = param.data + scale * noise * 1e-2
    torch.manual_seed(4)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    return module(x)


OPERATIONS: dict[str, Function] = {
    "p.norm()": lambda m, x: m.weight.norm(),
    "torch.linalg.vector_norm": lambda m, x: torch.linalg.vector_norm(m.weight),
    "torch.linalg.svdvals": lambda m, x: torch.linalg.svdvals(m.weight.reshape(len(m.weight), -1)),
    "p.quantile(0.3)": lambda m, x: m.weight.abs().quantile(0.3),
    "p.mean(), p.std(), p.sum()": lambda m, x: (m.weight.mean(), m.weight.std(), m.weight.sum()),
    "p.abs().topk(5)": lambda m, x: m.weight.abs().flatten().topk(5).values,
    "p.argmax()": lambda m, x: m.weight.argmax(),
    "p.shape, p.numel()": lambda m, x: (*m.weight.shape, m.weight.numel(), len(m.weight), m.weight.size(0)),
    "x @ p.T": lambda m, x: x.mean() * torch.ones(3, m.weight.shape[-1]) @ m.weight.view(m.weight.shape).T,
    "F.linear(x, p)": lambda m, x: nn.functional.linear(torch.ones(3, m.weight.shape[-1]), m.weight),
    "p[ids]": lambda m, x: m.weight[torch.tensor([3, 1, 1])],
    "F.embedding(ids, p)": lambda m, x: nn.functional.embedding(
        torch.tensor([3, 1]), m.weight if m.weight.ndim > 1 else m.weight[:, None]
    ),
    "p.mul_(2)": _in_place(lambda p: p.mul_(2)),
    "p.copy_(full)": _in_place(lambda p: p.copy_(_full_of(p))),
    "p.add_(full)": _in_place(lambda p: p.add_(_full_of(p))),
    "p.data.copy_(full)": lambda m, x: m.weight.data.copy_(_full_of(m.weight)),
    "p.lerp_(full, 0.1)": _in_place(lambda p: p.lerp_(_full_of(p), 0.1)),
    "p * row": lambda m, x: m.weight * torch.linspace(-1, 1, m.weight.shape[-1]),
    "p.data = full": _assign,
    "p[2] = 0": _in_place(lambda p: p.__setitem__(2, 0.0)),
    "p.index_add_": _in_place(lambda p: p.index_add_(0, torch.tensor([1]), torch.ones_like(p[:1]))),
    "p.masked_fill_(p > 0, 0)": _in_place(lambda p: p.masked_fill_(p > 0, 0)),
    "p.clamp_": _in_place(lambda p: p.clamp_(-0.1, 0.1)),
    "p[2].zero_()": _in_place(lambda p: p[2].zero_()),
    "p.view(-1).zero_()": _in_place(lambda p: p.view(-1).zero_()),
    "p.normal_()": _in_place(lambda p: p.normal_()),
    "p.uniform_()": _in_place(lambda p: p.uniform_()),
    "p.exponential_()": _in_place(lambda p: p.exponential_()),
    "p.bernoulli_(0.3)": _in_place(lambda p: p.bernoulli_(0.3)),
    "p.add_(randn_like(p))": _in_place(lambda p: p.add_(torch.randn_like(p))),
    "p.mul_(rand_like(p))": _in_place(lambda p: p.mul_(torch.rand_like(p))),
    "F.dropout(p)": lambda m, x: nn.functional.dropout(m.weight, 0.5),
    "torch.bernoulli(p)": lambda m, x: torch.bernoulli(m.weight.sigmoid()),
    "MeZO": _perturb,
    "p.clone().double()": lambda m, x: m.weight.detach().clone().double(),
    "torch.equal(p, full)": lambda m, x: int(torch.equal(m.weight, _full_of(m.weight))),
    "torch.stack([p, p])": lambda m, x: torch.stack([m.weight, m.weight]).sum(0),
    "copy.deepcopy(p)": lambda m, x: copy.deepcopy(m.weight),
    "p.tolist()": lambda m, x: torch.tensor(m.weight.tolist()),
    "p.detach().numpy()": lambda m, x: torch.from_numpy(m.weight.detach().numpy().copy()),
    "grad of p.square().sum()": _gradient_of(lambda p: p.square().sum()),
    "grad of p.norm()": _gradient_of(lambda p: p.norm()),
    "grad of (p @ p.T).sum()": _gradient_of(lambda p: (p.reshape(len(p), -1) @ p.reshape(len(p), -1).T).square().sum()),
    "grad of (p * full).sum()": _gradient_of(lambda p: (p * _full_of(p)).square().sum()),
    "hook: grad * full": _hooked(lambda grad: grad * _full_of(grad)),
    "hook: grad / grad.norm()": _hooked(lambda grad: grad / grad.norm()),
    "torch.autograd.grad": lambda m, x: torch.autograd.grad(m(x).pow(3).mean(), m.weight)[0].norm(),
    "~(p > 0)": lambda m, x: (~(m.weight > 0)).double(),
    "p.grad.norm()": _with_grad(lambda m, x: _grad(m).norm()),
    "p.grad.mul_(full)": _with_grad(lambda m, x: _grad(m).mul_(_full_of(m.weight))),
    "p.grad = full": _with_grad(lambda m, x: setattr(m.weight, "grad", _full_of(m.weight))),
    "torch._foreach_norm": lambda m, x: torch._foreach_norm(list(m.parameters())),
    "torch._foreach_mul_": _in_place(lambda p: torch._foreach_mul_([p, p], [2.0, 0.5])),
    "torch._foreach_lerp_": _in_place(lambda p: torch._foreach_lerp_([p], [_full_of(p)], 0.1)),
    "torch._fused_sgd_": _in_place(
        lambda p: torch._fused_sgd_(
            [p],
            [p * 2],
            [],
            weight_decay=0.1,
            momentum=0.0,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        )
    ),
    "safetensors.torch.save": lambda m, x: load(save({"p": m.weight.detach()}))["p"],
    "torch.ops, out=": _in_place(lambda p: torch.ops.aten.cumsum.out(p, 0, out=p)),
    "p.t_()": _in_place(lambda p: p.t_()),
    "F.relu(inplace=True)": _in_place(lambda p: nn.functional.relu(p, inplace=True)),
    "F.dropout(inplace=True)": _in_place(lambda p: nn.functional.dropout(p, 0.5, inplace=True)),
    "get_ema_multi_avg_fn": _in_place(
        lambda p: torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)([p], [p * 2], torch.tensor(3))
    ),
}
"""Other computations on parameters, by what a reader would write."""

FUNCTIONS: dict[str, Function] = {
    **dict(init_functions()),
    **{f"utils.{name}": function for name, function in UTILS.items()},
    **OPERATIONS,
}
