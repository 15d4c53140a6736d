"""Layers: the module lists of a model, the layer around a parameter, and a description that equal layers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def stacks(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """The outermost lists of modules, by name: the layers that repeat in a model; experts in them may be lists too.

    `name` is the model's own in the names.
    """
    for step, child in model.named_children():
        path = f"{name}.{step}".lstrip(".")
        if isinstance(child, nn.ModuleList):
            yield path, child
        else:
            yield from stacks(child, path)


def layer_around(model: nn.Module, name: str) -> str | None:
    """The layer that a parameter is in: the member of an outermost list, if the parameter is in a module of it.

    None where it is in none.
    """
    path = name.split(".")
    owner = model
    for depth, step in enumerate(path[:-2]):
        if isinstance(owner, nn.ModuleList):
            return ".".join(path[: depth + 1])
        owner = owner.get_submodule(step)
    return None


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that is a stack of them, inner ones first: the units in which FSDP gathers parameters.

    They are the modules that transformers would not spread over devices (`_no_split_modules`); where the class names
    none, the members of its outermost lists.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in kinds]
    return (named or [layer for _, stack in stacks(model) for layer in stack])[::-1]


def kind(layer: nn.Module) -> tuple[Any, ...]:
    """A description that alike layers share: modules, shapes of parameters, and flags such as a window's."""
    return tuple(
        (
            name,
            type(module).__name__,
            tuple((param, tuple(value.shape)) for param, value in module.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, bool | str | int | None) and not key.endswith(("idx", "index", "id", "number"))
            ),
        )
        for name, module in layer.named_modules()
    )
