"""transformers' renamings and converters -> a lazy expression over checkpoint tensors for every model parameter.

Converters are rewritten with lazy `operations`, so slices of their results read slices of their sources. A converter
that has no lazy equivalent falls back: transformers converts its complete sources, and the result is sliced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import WeightConverter

from ...errors import CheckpointError
from ...marks import untyped
from ...slices.lazy import Deferred, LazyTensor
from ...transformers_api import WeightRenaming, build_glob_alternation, dot_natural_key, rename_source_key
from .operations import convert_lazily

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Conversion:
    """The lazy values of a model's parameters and buffers, from a checkpoint."""

    expressions: dict[str, LazyTensor] = field(default_factory=dict)
    """Model parameter or buffer -> its full value, lazily."""
    unread: dict[str, set[str]] = field(default_factory=dict)
    """Checkpoint tensor that the model does not have -> its names in the model."""
    fallbacks: list[str] = field(default_factory=list)
    """Parameters that need complete sources."""
    beside: Mapping[str, LazyTensor] = field(default_factory=dict)
    """Tensors of quantised weights that no value depends on."""

    @property
    def unexpected(self) -> set[str]:
        """Names of `unread` tensors in the model."""
        return {name for names in self.unread.values() for name in names}


def renamer(
    model: PreTrainedModel, shapes: Mapping[str, torch.Size], weight_mapping: Sequence[Any] | None
) -> Callable[[str], tuple[str, str | None]]:
    """Function from a tensor of the checkpoint to its name in the model, and the pattern of a converter that takes it.

    Arguments as for `convert`.
    """
    renamings = [entry for entry in weight_mapping or () if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in weight_mapping or () if isinstance(entry, WeightConverter)]
    names: dict[str, Any] = dict.fromkeys(shapes, True)

    def rename(key: str) -> tuple[str, str | None]:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, names)
        return name, pattern

    return rename


def convert(
    model: PreTrainedModel,
    tensors: Mapping[str, LazyTensor],
    shapes: Mapping[str, torch.Size],
    weight_mapping: Sequence[Any] | None,
) -> Conversion:
    """Build lazy values for the parameters and buffers of `model` from the checkpoint's `tensors`.

    `shapes` are full shapes; `weight_mapping` are transformers' transforms for the model, in their order. Raises
    CheckpointError if a converter cannot convert its tensors.
    """
    converters = [entry for entry in weight_mapping or () if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    rename = renamer(model, shapes, weight_mapping)
    result = Conversion()
    groups: dict[str, _Group] = {}
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename(key)
        if name not in shapes:
            result.unread[key] = {name} if pattern is None else {*_targets(name, by_pattern[pattern])}
            continue
        if pattern is None:
            result.expressions[name] = tensors[key]
            continue
        group = groups.setdefault(name, _Group(name, by_pattern[pattern], FullModel(model, shapes)))
        group.sources.append((key, pattern, tensors[key]))

    for group in groups.values():
        targets = [target for target in _targets(group.first_target, group.converter) if target in shapes]
        converted = convert_lazily(group.converter, group.first_target, group.sources, group.model)
        if converted is None:
            result.fallbacks.append(group.first_target)
            dtype = group.sources[0][2].dtype
            result.expressions.update(
                {name: Deferred(partial(group.value, name), shape=shapes[name], dtype=dtype) for name in targets}
            )
        else:
            result.expressions.update({target: group.take(converted, target) for target in targets})
    # Transformers reverts these on save.
    untyped(model)._weight_conversions = [entry for entry in weight_mapping or () if entry.was_used()]
    return result


def identity(entry: Any) -> list[Any]:
    """Return a JSON identifier of a transform of transformers, equal across processes."""
    scope = getattr(entry, "scope_prefix", None)
    return [type(entry).__name__, [*entry.source_patterns], [*entry.target_patterns], scope]


def own_dtypes(names: Iterable[str], dtype_plan: Mapping[str, torch.dtype] | None) -> dict[str, torch.dtype]:
    """Those of `names` that have a dtype in transformers' `dtype_plan`, {pattern: dtype}, with this dtype."""
    if not dtype_plan:
        return {}
    patterns, by_group, _ = build_glob_alternation(list(dtype_plan))
    groups = {name: match.lastgroup for name in names if (match := patterns.search(name)) is not None}
    return {name: dtype_plan[by_group[group]] for name, group in groups.items() if group is not None}


def _targets(first_target: str, converter: WeightConverter) -> list[str]:
    """Return the names of all results of the converter."""
    first = converter.target_patterns[0]
    return [first_target.replace(first, target) for target in converter.target_patterns]


class FullModel:
    """A wrapper of a model that returns parameters in their full shapes, which converters compare to."""

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> None:
        self.model, self.shapes = model, shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return a meta tensor of the parameter's full shape. Raises AttributeError for unknown names."""
        if name not in self.shapes:
            raise AttributeError(f"{type(self.model).__name__} has no parameter {name}")
        return torch.empty(self.shapes[name], device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class _Group:
    """Checkpoint tensors that one converter turns into one or more parameters."""

    def __init__(self, first_target: str, converter: WeightConverter, model: FullModel) -> None:
        self.first_target, self.converter, self.model = first_target, converter, model
        self.sources: list[tuple[str, str, LazyTensor]] = []
        self.results: dict[str, torch.Tensor] = {}

    def take(self, values: dict[str, Any], target: str) -> Any:
        """Pop `target` from the results of the converter. Raises CheckpointError if it is missing."""
        if target not in values:
            raise CheckpointError(
                f"{target}: the converter of {self.sources[0][0]} gave {', '.join(sorted(values)) or 'nothing'} instead"
            )
        return values.pop(target)

    def value(self, target: str) -> torch.Tensor:
        """Return the full value of `target`. Transformers converts all targets at once; others are kept until taken."""
        if target not in self.results:
            converter = copy.deepcopy(self.converter)
            for key, pattern, tensor in self.sources:
                converter.add_tensor(self.first_target, key, pattern, tensor.materialize())
            values = converter.convert(self.first_target, model=self.model, config=self.model.config)
            self.results = {name: value[0] if isinstance(value, list) else value for name, value in values.items()}
        return cast(torch.Tensor, self.take(self.results, target))
