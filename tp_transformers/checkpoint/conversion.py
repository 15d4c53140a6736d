"""transformers' renamings and converters -> for every model parameter, a lazy expression over checkpoint tensors.

Renamings cost nothing. A converter that slices cannot be pushed through falls back: its sources are read whole,
converted by transformers itself, and then sliced; that is said once at INFO.

The internals of transformers that are used here are the same from 5.6 on.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from ..errors import CheckpointError
from ..lazy import Deferred, LazyTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass
class Conversion:
    """What a checkpoint means to a model."""

    expressions: dict[str, LazyTensor] = field(default_factory=dict)
    """Model parameter or buffer -> its whole value, lazily."""
    unexpected: set[str] = field(default_factory=set)
    """Checkpoint tensors (renamed) that the model has no place for."""


def convert(
    model: PreTrainedModel,
    tensors: Mapping[str, LazyTensor],
    shapes: Mapping[str, torch.Size],
    weight_mapping: Sequence[Any] | None,
) -> Conversion:
    """Express the state of `model` in terms of checkpoint tensors.

    Args:
        model: the model; its names, config and base-model prefix count.
        tensors: what the checkpoint holds.
        shapes: whole shape of every parameter and persistent buffer of the model.
        weight_mapping: transformers' transforms for this model, in their order.
    """
    renamings = [entry for entry in weight_mapping or () if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in weight_mapping or () if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names: dict[str, Any] = dict.fromkeys(shapes, True)

    result = Conversion()
    groups: dict[str, _Group] = {}
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, names)
        if pattern is None:
            if name in names:
                result.expressions[name] = tensors[key]
            else:
                result.unexpected.add(name)
            continue
        converter = by_pattern[pattern]
        if name not in names:
            result.unexpected.update(_targets(name, converter))
            continue
        if name not in groups:
            groups[name] = _Group(name, converter, model)
        groups[name].sources.append((key, pattern, tensors[key]))

    for group in groups.values():
        for target in _targets(group.first_target, group.converter):
            if target in names:
                result.expressions[target] = group.expression(target, shapes[target])
    if groups:
        logger.info(
            "%d parameters (%s, ...) are converted while loading; their sources are read whole",
            len(groups),
            next(iter(groups)),
        )
    # transformers reverts these on save.
    model._weight_conversions = [entry for entry in weight_mapping or () if entry.was_used()]  # type: ignore[attr-defined]
    return result


def dtype_policy(dtype_plan: Mapping[str, torch.dtype]) -> Callable[[str], torch.dtype | None]:
    """Which dtype transformers' `dtype_plan` keeps a parameter in; None where it has nothing to say."""
    if not dtype_plan:
        return lambda name: None
    patterns, by_group, _ = build_glob_alternation(list(dtype_plan))

    def policy(name: str) -> torch.dtype | None:
        found = patterns.search(name)
        return dtype_plan[by_group[found.lastgroup]] if found is not None and found.lastgroup is not None else None

    return policy


def _targets(first_target: str, converter: WeightConverter) -> list[str]:
    """The names of everything that the converter makes."""
    first = converter.target_patterns[0]
    return [first_target.replace(first, target) for target in converter.target_patterns]


class _Group:
    """Checkpoint tensors that one converter turns into one or more parameters, by transformers' own code."""

    def __init__(self, first_target: str, converter: WeightConverter, model: PreTrainedModel) -> None:
        self.first_target, self.converter, self.model = first_target, converter, model
        self.sources: list[tuple[str, str, LazyTensor]] = []
        self.results: dict[str, torch.Tensor] = {}

    def expression(self, target: str, shape: torch.Size) -> Deferred:
        return Deferred(lambda: self._value(target), shape=shape, dtype=self.sources[0][2].dtype)

    def _value(self, target: str) -> torch.Tensor:
        """The whole value of `target`; computed for all targets together, each kept until it is taken."""
        if target not in self.results:
            converter = copy.deepcopy(self.converter)
            for key, pattern, tensor in self.sources:
                converter.add_tensor(self.first_target, key, pattern, tensor.materialize())
            values = converter.convert(self.first_target, model=self.model, config=self.model.config)
            self.results = {name: value[0] if isinstance(value, list) else value for name, value in values.items()}
        try:
            return self.results.pop(target)
        except KeyError:
            raise CheckpointError(
                f"{target}: the converter of {self.sources[0][0]} gave {', '.join(sorted(values))} instead"
            ) from None
