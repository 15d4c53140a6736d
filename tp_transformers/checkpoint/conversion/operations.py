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
from itertools import accumulate, pairwise
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


def convert_lazily(
    converter: WeightConverter, target: str, sources: Sources, model: Any
) -> dict[str, LazyTensor] | None:
    """Apply `converter` lazily to `sources`: {parameter name: lazy tensor}; None if it has no lazy equivalent.

    `target` is the name of the first result; operations read config and full shapes from `model`. Raises
    CheckpointError if transformers cannot convert tensors of these shapes (for example, an expert is missing).
    """
    if not all(type(operation) in _TABLE for operation in converter.operations):
        return None
    lazily = copy.deepcopy(converter)
    lazily.operations = [_LazyOperation(operation, target, sources) for operation in converter.operations]
    for name, pattern, tensor in sources:
        lazily.add_tensor(target, name, pattern, tensor)
    try:
        values = lazily.convert(target, model=model, config=model.config)
        return {name: _single(value) for name, value in values.items()}
    except ValueError:  # a table entry or a lazy operation does not apply
        return None


class _LazyOperation:
    """The lazy version of an operation of transformers: takes and returns lazy tensors."""

    def __init__(self, operation: Any, target: str, sources: Sources) -> None:
        self.operation, self.target, self.sources = operation, target, sources

    def convert(self, tensors: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        """Run transformers on meta tensors for names and shapes, and the table for the lazy results."""
        lists = {pattern: _as_list(value) for pattern, value in tensors.items()}
        metas = {pattern: list(map(_meta, sources)) for pattern, sources in lists.items()}
        lazy_by_id = {
            id(meta): tensor for pattern in lists for meta, tensor in zip(metas[pattern], lists[pattern], strict=True)
        }

        def run(values: dict[str, Any]) -> dict[str, Any]:
            results: dict[str, Any] = self.operation.convert(dict(values), **arguments)
            return results

        # A list stays a list: operations distinguish them.
        inputs = {key: metas[key] if isinstance(value, list) else metas[key][0] for key, value in tensors.items()}
        try:
            results = run(inputs)
        except Exception as error:
            raise self._inconvertible(error) from error
        expected = [_single(result) for result in results.values()]
        if all(id(meta) in lazy_by_id for meta in expected):  # an operation with nothing to do returns its inputs
            lazy = [lazy_by_id[id(meta)] for meta in expected]
        else:
            lazy = _TABLE[type(self.operation)](_Step(self.operation, lists, expected, arguments, run))
        if [tensor.shape for tensor in lazy] != [meta.shape for meta in expected]:
            raise ValueError(f"{self.operation}: other shapes than transformers gives")
        return {
            pattern: [tensor] if isinstance(result, list) else tensor
            for (pattern, result), tensor in zip(results.items(), lazy, strict=True)
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
    expected: list[torch.Tensor]
    """The results as meta tensors, in transformers' order."""
    arguments: dict[str, Any]
    run: Callable[[dict[str, Any]], dict[str, Any]]


def _stack(step: _Step) -> list[LazyTensor]:
    return [Stack(tensors, step.operation.dim % (tensors[0].ndim + 1)) for tensors in step.sources.values()]


def _unbind(step: _Step) -> list[LazyTensor]:
    results: list[LazyTensor] = []
    for (tensor,) in step.sources.values():
        dim = step.operation.dim % tensor.ndim
        results += [Squeeze(tensor.select(dim, [(index, index + 1)]), dim) for index in range(tensor.shape[dim])]
    return results


def _concatenate(step: _Step) -> list[LazyTensor]:
    """Concatenate all tensors, pattern by pattern in the converter's order."""
    patterns = [pattern for pattern in step.arguments["source_patterns"] if pattern in step.sources]
    tensors = [tensor for pattern in patterns for tensor in step.sources[pattern]]
    return [Concat(tensors, step.operation.dim % tensors[0].ndim)]


def _split(step: _Step) -> list[LazyTensor]:
    """Cut one tensor along a dim, by default the first, into the lengths that transformers computes.

    Raises ValueError if these are longer than the tensor.
    """
    ((source,),) = step.sources.values()
    dim = getattr(step.operation, "dim", 0) % source.ndim
    stops = list(accumulate(meta.shape[dim] for meta in step.expected))
    if stops[-1] > source.shape[dim]:
        raise ValueError(f"{step.operation}: indices that the source does not have")
    return [source.select(dim, [span]) for span in pairwise([0, *stops])]


def _transpose(step: _Step) -> list[LazyTensor]:
    ((source,),) = step.sources.values()
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
    orders = [_single(order).flatten().tolist() for order in step.run(indices).values()]
    sources = [tensor for (tensor,) in step.sources.values()]
    return [permute(*entry) for entry in zip(sources, dims, orders, strict=True)]


def _fuse_experts(step: _Step) -> list[LazyTensor]:
    """Chunk each list of experts over the targets; for each target, stack its chunks and concatenate them."""
    operation, targets = step.operation, step.arguments["target_patterns"]
    per_target: list[list[LazyTensor]] = [[] for _ in targets]
    for pattern in step.arguments["source_patterns"]:
        chunks = operation.split_list_into_chunks(step.sources[pattern], chunks=len(targets))
        for stacks, chunk in zip(per_target, chunks, strict=True):
            stacks.append(Stack(chunk, operation.stack_dim))
    return [Concat(stacks, operation.concat_dim) for stacks in per_target]


_BY_NAME: dict[str, Callable[[_Step], list[LazyTensor]]] = {
    "Chunk": _split,
    "Concatenate": _concatenate,
    "ErnieFuseAndSplitTextVisionExperts": _fuse_experts,
    "Inkling2UnpadVocab": _split,
    "Interleave": _permute,
    "MergeModulelist": _stack,
    "PermuteForRope": _permute,
    "Split": _split,
    "SplitModulelist": _unbind,
    "Transpose": _transpose,
}
_TABLE = {getattr(core_model_loading, name, None): build for name, build in _BY_NAME.items()}
"""Class of an operation of transformers -> a function that builds its results, in transformers' order."""


def _meta(tensor: LazyTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _single(value: Any) -> Any:
    """Return the tensor of a result, which may be in a list. Raises ValueError if there are several."""
    (tensor,) = _as_list(value)
    return tensor
