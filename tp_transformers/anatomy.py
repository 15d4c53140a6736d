"""The anatomy of a transformers model: kinds, widths and head counts of modules, layers, inner models, names, ties.

transformers has no common base class for attention, experts or norms: a module is recognised by its class name, its
attributes and its config. No other module of this package determines the kind of a module, so that an architecture with
other names needs a change here alone. Nothing here communicates, and models may be on the meta device.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from transformers import Conv1D

if TYPE_CHECKING:
    from transformers import PreTrainedModel

V = TypeVar("V", bound=Hashable)

CACHES = ("cache", "cache_params", "past_key_values")
"""Names of a forward's cache argument; "cache" since transformers 5.24."""


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a forward or of `generate`; None without a cache."""
    return next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)


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


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def features(module: nn.Module) -> tuple[int, int] | None:
    """(input, output) features of a linear or embedding (rows, features); None for any other module.

    Stacked experts, one weight (experts, out, in) for tokens sorted by expert, count as one linear.
    """
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    if "weight" in module._parameters and hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    weight = module._parameters.get("weight")
    if weight is not None and weight.ndim == 3 and hasattr(module, "input_size") and hasattr(module, "output_size"):
        return int(module.input_size), int(module.output_size)  # type: ignore[arg-type]
    return None


def input_width(module: nn.Module) -> int:
    """Input features of a linear or an embedding; 0 for any other module."""
    return (features(module) or (0, 0))[0]


def output_width(module: nn.Module) -> int:
    """Output features of a linear or an embedding; 0 for any other module."""
    return (features(module) or (0, 0))[1]


def is_transposed(module: nn.Module) -> bool:
    """True if a linear's weight is (in, out), as in GPT-2's Conv1D: strategies shard it along the other dim."""
    return isinstance(module, Conv1D)


def embeds_states(module: nn.Module, config: Any) -> bool:
    """True for an embedding with the hidden size; norms and residual sums need all its features."""
    return isinstance(module, nn.Embedding) and module.embedding_dim == getattr(config, "hidden_size", None)


def holds_experts(module: nn.Module) -> bool:
    """True if the module's parameters are expert weights (experts, ...) and their biases."""
    shapes = [param.shape for param in module.parameters(recurse=False)]
    return (
        not isinstance(module, CONVOLUTIONS)
        and features(module) is None
        and {2, 3} >= {len(shape) for shape in shapes} >= {3}
        and len({shape[0] for shape in shapes}) == 1
        and not any(map(features, module.children()))  # else a mixer, which has heads
    )


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


def inner_models(model: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """(name, model) of the models inside `model`: a language model, a vision tower, ..., outermost first.

    They are the submodels with a different model type; a base model has the type of its model.
    """
    from transformers import PreTrainedModel  # a second of imports, which strategies alone do not need

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


HEADS = -3
"""The dim of the heads: (batch, heads, queries, keys), of local attention (batch, blocks, heads, queries, keys)."""
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
"""Attributes of transformers' attention modules, or of their configs, with counts and sizes of heads."""


def is_attention(module: nn.Module) -> bool:
    """True for attention, and for a layer that contains it, as in T5; see `is_around_attention`."""
    return "Attention" in type(module).__name__


def is_cross_attention(name: str) -> bool:
    """True for the name of cross-attention: EncDecAttention, encoder_attn, crossattention.self, or .attention."""
    *around, own = name.lower().split(".")
    if own in ("self", "attention") and around and "att" in around[-1]:
        own = around[-1]
    return "cross" in own or own.startswith("enc")


def attention_config(module: nn.Module, model: PreTrainedModel) -> Any:
    """The config with the head counts of an attention module: its own, or the model's text config."""
    return getattr(module, "config", None) or model.config.get_text_config()


def config_around(modules: Mapping[str, nn.Module], name: str) -> Any:
    """The config of the module `name`, or of the nearest module around it with a config.

    Strategies are bound to this config. `modules` are all modules of the model.
    """
    while name and not hasattr(modules[name], "config"):
        name = name.rpartition(".")[0]
    return modules[name].config


def head_counts(module: nn.Module, config: Any) -> tuple[int, int]:
    """(query heads, KV heads) from a module's attributes or its config; 0 if neither has them."""
    query = first_of(QUERY_COUNTS, module, config) or 0
    return query, first_of(KV_COUNTS, module, config) or query


def reads_counts_of_config(module: nn.Module) -> bool:
    """True if the forward of an attention module may read a head count from its config, as Moonshine's does."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not {"num_attention_heads", *KV_COUNTS}.isdisjoint(code.co_names)


def first_of(names: tuple[str, ...], *owners: Any) -> int | None:
    """The first positive integer among the attributes `names` of the first of `owners` that has one."""
    values = (_get(owner, name) for owner in owners for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # a config with different layers raises for fields that differ between them
        return None
