"""Parts of a model: models inside it, module lists, the layer of a parameter, and norms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def is_norm(module: nn.Module) -> bool:
    """True for a norm of any kind, recognised by its class name. Norms are deterministic, so they may be recomputed."""
    return "Norm" in type(module).__name__


def is_rms_norm(module: nn.Module, shape: Sequence[int]) -> bool:
    """True if a module with a weight of `shape` is an RMS norm: it has an epsilon, no bias, and is no LayerNorm."""
    has_bias = "bias" in dict(module.named_parameters())
    return bool(shape) and epsilon(module) is not None and not isinstance(module, nn.LayerNorm) and not has_bias


def epsilon(module: nn.Module) -> float | None:
    """The epsilon of a norm, by the names in transformers and torch; None without one."""
    values = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    return next((value for value in values if value is not None), None)
