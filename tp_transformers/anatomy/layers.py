"""Layers: the module lists of a model, the layer of a parameter, and a description to compare layers by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def stacks(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """(name, list) of the outermost module lists: the repeated layers of a model; layers may contain lists of experts.

    `name` is the prefix of the names.
    """
    for step, child in model.named_children():
        path = f"{name}.{step}".lstrip(".")
        if isinstance(child, nn.ModuleList):
            yield path, child
        else:
            yield from stacks(child, path)


def layer_around(model: nn.Module, name: str) -> str | None:
    """The name of the layer of a parameter: an entry of an outermost module list.

    None if it is in no layer, or a direct parameter of the layer.
    """
    path = name.split(".")
    owner = model
    for depth, step in enumerate(path[:-2]):
        if isinstance(owner, nn.ModuleList):
            return ".".join(path[: depth + 1])
        owner = owner.get_submodule(step)
    return None


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, inner ones first; FSDP wraps each of them.

    They are the modules that transformers keeps on one device (`_no_split_modules`), or else the entries of the
    outermost module lists.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in kinds]
    return (named or [layer for _, stack in stacks(model) for layer in stack])[::-1]


def kind(layer: nn.Module) -> tuple[Any, ...]:
    """A description that is equal for equal layers: modules, parameter shapes, and settings such as a window."""
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
