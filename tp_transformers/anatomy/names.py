"""Names of modules and parameters: layer numbers in them, modules around them, and tied parameters."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

V = TypeVar("V", bound=Hashable)

CACHES = ("cache", "cache_params", "past_key_values")
"""Names of the argument of a forward that is a cache: the first one since transformers 5.24."""


def fold_layers(name: str) -> str:
    """A name with its layer numbers replaced by `*`: of plans and messages, where a model may not be at hand."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def fold_lists(model: nn.Module, name: str) -> str:
    """A name with the numbers of module lists replaced by `*`; those of an nn.Sequential tell its modules apart."""
    owner: Any = model
    path = []
    for step in name.split("."):
        path.append("*" if isinstance(owner, nn.ModuleList) and step.isdecimal() else step)
        owner = getattr(owner, step, None)
    return ".".join(path)


def folded(values: Iterable[tuple[str, V]]) -> dict[str, dict[V, list[str]]]:
    """{name with `*` for layer numbers: {value: the names that have it}}, all in the order of `values`."""
    found: dict[str, dict[V, list[str]]] = {}
    for name, value in values:
        found.setdefault(fold_layers(name), {}).setdefault(value, []).append(name)
    return found


def layer_number(name: str) -> int | None:
    """The first number in a name, which is that of a layer; None where there is none."""
    return next((int(step) for step in name.split(".") if step.isdigit()), None)


def names_around(name: str) -> Iterator[str]:
    """The name of a module, and of those around it, from the inside out; not the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def is_inside(name: str, module: str) -> bool:
    """True if the module, parameter or pattern `name` belongs to `module`, and is not that itself."""
    return name.startswith(f"{module}.")


def base_prefix(model: PreTrainedModel) -> str:
    """The base model's name in the full model; "" where they are one."""
    if model.base_model is not model:
        return str(model.base_model_prefix)
    # A class may declare the prefix of a larger model that it is a part of (Llama4ForCausalLM).
    return "model" if hasattr(getattr(model, "model", None), "base_model_prefix") else ""


def tied_parameters(model: nn.Module) -> Mapping[str, str]:
    """{tied parameter: the parameter that it is tied to}, by the config and the class; empty for other modules."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def untie(model: PreTrainedModel, name: str) -> None:
    """Take a parameter off `tied_parameters`: transformers will then not tie it."""
    del model.all_tied_weights_keys[name]


def inner(module: nn.Module, name: str) -> Any:
    """The object with a dotted name in a module; None where there is nothing."""
    found: Any = module
    for step in name.split("."):
        found = getattr(found, step, None)
    return found


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a parameter or buffer, and its name there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
