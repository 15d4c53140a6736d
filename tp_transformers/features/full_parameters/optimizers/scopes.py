"""Scopes of optimizers: their steps compute with shards, or with one full parameter at a time."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ....errors import UnsupportedError

Scope = Literal["shard", "parameter"]
"""The least that an update needs: its own elements, or its own full parameter."""

ATTRIBUTE = "tp_scope"
"""Attribute of an optimizer's class that declares its scope."""

_SCOPES: dict[tuple[str, Scope], str] = {
    ("torch", "shard"): "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD SparseAdam",
    ("torch", "parameter"): "Adafactor Muon",
    ("transformers", "parameter"): "Adafactor",
    # Their 8-bit states are quantised in blocks of this rank's elements.
    ("bitsandbytes", "shard"): (
        "Adagrad Adagrad8bit Adagrad32bit Adam Adam8bit Adam32bit PagedAdam PagedAdam8bit PagedAdam32bit AdamW "
        "AdamW8bit AdamW32bit PagedAdamW PagedAdamW8bit PagedAdamW32bit AdEMAMix AdEMAMix8bit AdEMAMix32bit "
        "PagedAdEMAMix PagedAdEMAMix8bit PagedAdEMAMix32bit Lion Lion8bit Lion32bit PagedLion PagedLion8bit "
        "PagedLion32bit RMSprop RMSprop8bit RMSprop32bit SGD SGD8bit SGD32bit"
    ),
    ("torchao", "shard"): "Adam8bit AdamW8bit Adam4bit AdamW4bit AdamFp8 AdamWFp8",
    ("schedulefree", "shard"): (
        "AdamWScheduleFree AdamWScheduleFreeClosure RAdamScheduleFree RAdamScheduleFreeClosure SGDScheduleFree "
        "SGDScheduleFreeClosure"
    ),
    ("galore_torch", "parameter"): "GaLoreAdamW GaLoreAdafactor AdamW Adafactor",
    ("apollo_torch", "parameter"): "APOLLOAdamW AdamW",
    # With use_gc=True, Lion too subtracts means of full gradients.
    ("pytorch_optimizer", "parameter"): "Lion ScalableShampoo Shampoo SOAP",
    ("optimi", "parameter"): "StableAdamW",
}
_KNOWN: dict[tuple[str, str], Scope] = {
    (package, name): scope for (package, scope), names in _SCOPES.items() for name in names.split()
}
"""Scope by package and class name of an optimizer; each has been compared with one process."""


def scope_of(kind: type[Optimizer]) -> Scope | None:
    """The declared or known scope of a class, also for a subclass that replaces no method of a known one; else None."""
    for base in kind.__mro__:
        if ATTRIBUTE in vars(base):
            return getattr(kind, ATTRIBUTE)  # type: ignore[no-any-return]
        known = _KNOWN.get((base.__module__.partition(".")[0], base.__name__))
        if known is not None:
            return None if _replaces(kind, base) else known
    return None


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise UnsupportedError if no scope is known for an optimizer, or none is right for it."""
    kind = type(optimizer)
    name, package = kind.__name__, kind.__module__.partition(".")[0]
    if package == "lomo_optim":
        check_in_backward(name)
    if hasattr(kind, "first_step") and hasattr(kind, "second_step"):
        raise UnsupportedError(
            name,
            got="an optimizer of sharpness-aware minimization, whose first_step takes the norm of this rank's shards",
            expected="one that updates parameters in step() alone",
            fix="Train without it, or in one process.",
        )
    if name == "ZeroRedundancyOptimizer":
        raise UnsupportedError(
            name,
            got="shards of a model, on ranks that it takes for copies",
            expected="copies of a complete model",
            fix='Call tp_transformers.data_parallel(model, mesh, mode="shard"), which shards states over copies too.',
        )
    scope = scope_of(kind)
    if scope not in ("shard", "parameter"):
        raise UnsupportedError(
            name if scope is None else f"{name}.{ATTRIBUTE}",
            got="an optimizer whose step may need several full parameters" if scope is None else repr(scope),
            expected=f'a known one, or one with {ATTRIBUTE} "shard" or "parameter"',
            fix=f'Set {name}.{ATTRIBUTE} = "shard" if each element is updated from its own gradient, "parameter" if '
            "each parameter is from its own. Otherwise make the optimizer, and call its step, inside of "
            "`with tp_transformers.training.full_parameters(model):`.",
        )


def check_in_backward(name: str) -> None:
    """Raise UnsupportedError for an optimizer that updates parameters in the backward; `name`: Trainer's `optim`."""
    if name.lower() in ("lomo", "adalomo") or name.endswith("_layerwise"):
        raise UnsupportedError(
            name,
            got="an optimizer that updates parameters in the backward, of which each rank has another shard",
            expected="one whose step follows the backward",
            fix="Take the same optimizer without _layerwise, sgd for lomo, or adafactor for adalomo.",
        )


def _replaces(kind: type, known: type) -> bool:
    """True if `kind`, or a base before `known`, replaces a method other than `__init__`."""
    for base in kind.__mro__[: kind.__mro__.index(known)]:
        for name, value in vars(base).items():
            is_own = inspect.unwrap(_function(value)) is not inspect.unwrap(_function(getattr(known, name, None)))
            if name != "__init__" and callable(_function(value)) and is_own:
                return True
    return False


def _function(value: Any) -> Any:
    return getattr(value, "__func__", value.fget if isinstance(value, property) else value)


def parameter_groups(
    parameters: nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Groups for an optimizer; the parameters of each are all DTensors of one mesh, or all plain.

    torch's operators on many tensors (`torch._foreach_*`) reject a mix of DTensors with plain tensors or with DTensors
    of another mesh. Values and states do not depend on the grouping. Optimizers do not need such groups once a model
    has been loaded with a plan (see `STEPS_ON_SHARDS`): they are for your own code that computes a group at a time.

    Args:
        parameters: a model, parameters, or groups of an optimizer; each group keeps its other settings.
    """
    if isinstance(parameters, nn.Module):
        parameters = list(parameters.parameters())
    entries = list(parameters)
    groups = entries if entries and isinstance(entries[0], Mapping) else [{"params": entries}]
    result: list[dict[str, Any]] = []
    for group in groups:
        assert isinstance(group, Mapping)
        group_params = group["params"]
        kinds: dict[Any, list[Any]] = {}
        for param in [group_params] if isinstance(group_params, Tensor) else group_params:
            kinds.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
        result += [{**group, "params": params} for params in kinds.values()]
    return result
