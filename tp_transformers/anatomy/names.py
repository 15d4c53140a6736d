"""Names of modules and parameters: layer numbers, enclosing modules, and tied parameters."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

V = TypeVar("V", bound=Hashable)

CACHES = ("cache", "cache_params", "past_key_values")
"""Names of a forward's cache argument; "cache" since transformers 5.24."""


def fold_layers(name: str) -> str:
    """Replace the layer numbers in a name by `*`; needs no model."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def folded(values: Iterable[tuple[str, V]]) -> dict[str, dict[V, list[str]]]:
    """Group names by `fold_layers` and value: {folded name: {value: names}}, in the order of `values`."""
    groups: dict[str, dict[V, list[str]]] = {}
    for name, value in values:
        groups.setdefault(fold_layers(name), {}).setdefault(value, []).append(name)
    return groups


def layer_number(name: str) -> int | None:
    """The first number in a name, which is the layer's; None without numbers."""
    return next((int(step) for step in name.split(".") if step.isdigit()), None)


def names_around(name: str) -> Iterator[str]:
    """The name of a module and of the modules around it, innermost first; without the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def is_inside(name: str, module: str) -> bool:
    """True if the module, parameter or pattern `name` is inside `module` (and not `module` itself)."""
    return name.startswith(f"{module}.")


def base_prefix(model: PreTrainedModel) -> str:
    """The base model's name in the full model; "" if `model` is the base model."""
    if model.base_model is not model:
        return str(model.base_model_prefix)
    # A class may declare the prefix of a larger model that contains it (Llama4ForCausalLM).
    return "model" if hasattr(getattr(model, "model", None), "base_model_prefix") else ""


def tied_parameters(model: nn.Module) -> Mapping[str, str]:
    """{tied parameter: the parameter that it is tied to}, from the config and the class; empty for other modules."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def untie(model: PreTrainedModel, name: str) -> None:
    """Remove a parameter from `tied_parameters`, so that transformers does not tie it."""
    del model.all_tied_weights_keys[name]


def inner(module: nn.Module, name: str) -> Any:
    """The object with a dotted name in a module; None if it does not exist."""
    value: Any = module
    for step in name.split("."):
        value = getattr(value, step, None)
    return value


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that owns a parameter or buffer, and its name there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def without_values(model: nn.Module) -> list[str]:
    """Names of parameters that have a shape and no values: a feature keeps another form, and marks them."""
    return [name for name, param in model.named_parameters() if hasattr(param, "tp_needs_values")]


def check_values(model: nn.Module, subject: str, got: str = "a model with {}") -> None:
    """Raise the error of the feature that keeps a parameter without values, since `subject` needs the values.

    `got`: what `subject` was given; {} stands for what the feature calls such parameters.
    """
    for name, param in model.named_parameters():
        if hasattr(param, "tp_needs_values"):
            raise param.tp_needs_values(subject, f"{got} ({name}, ...)")
