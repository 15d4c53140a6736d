"""Parts of a model: models inside it, module lists, and the layer of a parameter."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel


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


def inner_models(model: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """(name, model) of the models inside `model`: a language model, a vision tower, ..., outermost first.

    They are the submodels with a different model type; a base model has the type of its model.
    """
    own = getattr(getattr(model, "config", None), "model_type", None)
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module.config.model_type != own:
            yield name, module
