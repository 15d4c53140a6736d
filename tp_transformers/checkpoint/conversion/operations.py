"""The operations of transformers' converters, on lazy tensors: a slice of a result reads slices of its sources.

Each operation of transformers runs on empty tensors of the same shapes. That gives the names, the sizes that depend on
the config or the model, the tensors that it returns unchanged, and its errors. The table below only maps results to
source tensors; a new operation is one entry. For an operation that is not in the table, or that depends on values, the
caller reads the complete sources.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import WeightConverter

from ...errors import CheckpointError
from ...slices.composed import Concat, Squeeze, Stack, Transpose, permute
from ...slices.lazy import LazyTensor
from ...transformers_api import core_model_loading

Sources = Sequence[tuple[str, str, LazyTensor]]
"""Input of a converter: (checkpoint name, source pattern that it matched, tensor), in checkpoint order."""

_SHORTEST_ROW = 64
"""Fewest bytes of a row to read by itself; tensors with shorter rows are read completely and then permuted."""


def express(converter: WeightConverter, target: str, sources: Sources, model: Any) -> dict[str, LazyTensor] | None:
    """Apply `converter` lazily to `sources`: {parameter name: lazy tensor}; None if it has no lazy equivalent.

    `target` is the name of the first result; operations read config and full shapes from `model`. Raises
    CheckpointError if transformers cannot convert tensors of these shapes (for example, an expert is missing).
    """
    if not all(map(_is_known, converter.operations)):
        return None
    lazily = copy.deepcopy(converter)
    lazily.operations = [_Expressed(operation, target, sources) for operation in converter.operations]
    for name, pattern, tensor in sources:
        lazily.add_tensor(target, name, pattern, tensor)
    try:
        values = lazily.convert(target, model=model, config=model.config)
        return {name: _only(value) for name, value in values.items()}
    except ValueError:  # a table entry or a lazy operation does not apply
        return None


def _is_known(operation: Any) -> bool:
    """Return True for transformers' own operations in the table, not for other classes of the same name."""
    name = type(operation).__name__
    return name in _TABLE and getattr(core_model_loading, name, None) is type(operation)


class _Expressed:
    """The lazy version of an operation of transformers: takes and returns lazy tensors."""

    def __init__(self, operation: Any, target: str, sources: Sources) -> None:
        self.operation, self.target, self.sources = operation, target, sources

    def convert(self, tensors: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        """Run transformers on meta tensors for names and shapes, and the table for the lazy results."""
        likes = {pattern: _each(value, _like) for pattern, value in tensors.items()}
        given = {
            id(like): tensor
            for pattern, value in tensors.items()
            for like, tensor in zip(_listed(likes[pattern]), _listed(value), strict=True)
        }

        def run(values: dict[str, Any]) -> dict[str, Any]:
            results: dict[str, Any] = self.operation.convert(dict(values), **arguments)
            return results

        try:
            results = run(likes)
        except Exception as error:
            raise self._inconvertible(error) from error
        wanted = [_only(result) for result in results.values()]
        if all(id(like) in given for like in wanted):  # an operation with nothing to do returns its inputs
            made = [given[id(like)] for like in wanted]
        else:
            lists = {pattern: _listed(value) for pattern, value in tensors.items()}
            made = _TABLE[type(self.operation).__name__](_Step(self.operation, lists, wanted, arguments, run))
        if [tensor.shape for tensor in made] != [like.shape for like in wanted]:
            raise ValueError(f"{self.operation}: other shapes than transformers gives")
        # A list stays a list: the next operation distinguishes them.
        return {
            pattern: [tensor] if isinstance(result, list) else tensor
            for (pattern, result), tensor in zip(results.items(), made, strict=True)
        }

    def _inconvertible(self, error: Exception) -> CheckpointError:
        counts = Counter(pattern for _, pattern, _ in self.sources)
        return CheckpointError(
            f"{self.target}, which is made of {self.sources[0][0]} and others",
            got=" and ".join(f"{count} tensors of {pattern}" for pattern, count in counts.items()),
            expected=f"what {type(self.operation).__name__} can convert ({error})",
            fix="Tensors are missing, or of the wrong shape; download the checkpoint again.",
        )


@dataclass(frozen=True)
class _Step:
    """One operation, its inputs, and transformers' results on meta tensors."""

    operation: Any
    sources: dict[str, list[LazyTensor]]
    """Inputs by pattern, in transformers' order."""
    wanted: list[torch.Tensor]
    """The results as meta tensors, in transformers' order."""
    arguments: dict[str, Any]
    run: Callable[[dict[str, Any]], dict[str, Any]]

    @property
    def only_source(self) -> LazyTensor:
        """The single input. Raises ValueError if there are several."""
        ((tensor,),) = self.sources.values()
        return tensor


def _merge(step: _Step) -> list[LazyTensor]:
    """Stack the tensors of each pattern along a new dim."""
    return [Stack(tensors, step.operation.dim % (tensors[0].ndim + 1)) for tensors in step.sources.values()]


def _unmerge(step: _Step) -> list[LazyTensor]:
    """Unbind each tensor along a dim."""
    made: list[LazyTensor] = []
    for (tensor,) in step.sources.values():
        dim = step.operation.dim % tensor.ndim
        made += [Squeeze(tensor.select(dim, [(index, index + 1)]), dim) for index in range(tensor.shape[dim])]
    return made


def _concatenate(step: _Step) -> list[LazyTensor]:
    """Concatenate all tensors, pattern by pattern in the converter's order."""
    patterns = [pattern for pattern in step.arguments["source_patterns"] if pattern in step.sources]
    tensors = [tensor for pattern in patterns for tensor in step.sources[pattern]]
    return [Concat(tensors, step.operation.dim % tensors[0].ndim)]


def _cut(step: _Step) -> list[LazyTensor]:
    """Split one tensor along a dim, into the lengths that transformers computes."""
    source = step.only_source
    dim = step.operation.dim % source.ndim
    made: list[LazyTensor] = []
    start = 0
    for like in step.wanted:
        made.append(source.select(dim, [(start, start + like.shape[dim])]))
        start += like.shape[dim]
    return made


def _first_rows(step: _Step) -> list[LazyTensor]:
    """Keep the first rows, as many as transformers keeps. Raises ValueError if it adds rows."""
    source, (like,) = step.only_source, step.wanted
    if like.shape[0] > source.shape[0]:
        raise ValueError(f"{step.operation}: rows that the source does not have")
    return [source.select(0, [(0, like.shape[0])])]


def _transpose(step: _Step) -> list[LazyTensor]:
    """Swap two dims of one tensor."""
    source = step.only_source
    return [Transpose(source, step.operation.dim0 % source.ndim, step.operation.dim1 % source.ndim)]


def _permute(step: _Step) -> list[LazyTensor]:
    """Reorder the rows of a dim of each tensor; transformers gives the order by permuting their indices."""
    indices: dict[str, Any] = {}
    dims = []
    for pattern, (tensor,) in step.sources.items():
        dim = getattr(step.operation, "dim", 0) % tensor.ndim
        if math.prod(tensor.shape[dim + 1 :]) * tensor.dtype.itemsize < _SHORTEST_ROW:
            raise ValueError(f"{step.operation}: rows too short to be read one by one")
        shape = [1] * tensor.ndim
        shape[dim] = -1
        indices[pattern] = torch.arange(tensor.shape[dim]).view(shape)
        dims.append(dim)
    orders = [_only(order).flatten().tolist() for order in step.run(indices).values()]
    sources = [tensor for (tensor,) in step.sources.values()]
    return [permute(*each) for each in zip(sources, dims, orders, strict=True)]


def _fuse_experts(step: _Step) -> list[LazyTensor]:
    """Chunk each list of experts over the targets; for each target, stack its chunks and concatenate them."""
    operation, targets = step.operation, step.arguments["target_patterns"]
    parts: list[list[LazyTensor]] = [[] for _ in targets]
    for pattern in step.arguments["source_patterns"]:
        shares = operation.split_list_into_chunks(step.sources[pattern], chunks=len(targets))
        for part, share in zip(parts, shares, strict=True):
            part.append(Stack(share, operation.stack_dim))
    return [Concat(part, operation.concat_dim) for part in parts]


_TABLE: dict[str, Callable[[_Step], list[LazyTensor]]] = {
    "Chunk": _cut,
    "Concatenate": _concatenate,
    "ErnieFuseAndSplitTextVisionExperts": _fuse_experts,
    "Inkling2UnpadVocab": _first_rows,
    "Interleave": _permute,
    "MergeModulelist": _merge,
    "PermuteForRope": _permute,
    "Split": _cut,
    "SplitModulelist": _unmerge,
    "Transpose": _transpose,
}
"""Name of an operation's class in transformers -> a function that builds its results, in transformers' order."""


def _like(tensor: LazyTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    return [function(item) for item in value] if isinstance(value, list) else function(value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _only(value: Any) -> Any:
    """Return the tensor of a result, which may be in a list. Raises ValueError if there are several."""
    (tensor,) = _listed(value)
    return tensor
