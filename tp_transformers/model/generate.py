"""`generate` on ranks that share one model: one random state, one prompt, one moment to stop.

Each rank decodes for itself, from logits that are the same on all; so the ranks keep in step as long as nothing that
each has of its own gets into it. So ranks share random states at the start, and the results of clocks and of users'
code in every step.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import MaxTimeCriteria, StoppingCriteriaList

from ..errors import MeshError
from ..plans.bind import Resolution
from ..ranks.group import TensorParallelGroup
from ..ranks.random_state import random_state, set_random_state
from ..strategies import local_tensor, same_inputs
from ..transformers_api import BaseStreamer
from .failures import fail_together

_Model: Any = object
"""Base of the methods: a PreTrainedModel with GenerationMixin, in the class of a model."""
OWN = ("streamer", "stopping_criteria")
"""Arguments of `generate` that some ranks may have and others not."""

_FAILED = 2
"""Vote of a rank that failed; 1 is stop, 0 is go on."""


class TensorParallelGeneration(_Model):
    """Methods of a model that can generate, overridden so that its ranks stay in step."""

    tp_group: TensorParallelGroup
    tp_resolution: Resolution

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The `generate` of the model's own class, which all ranks have to call, with the same inputs.

        Every rank draws what one process with rank 0's random state draws. A streamer may be given to some ranks alone,
        and so may stopping criteria: where one of them says stop, or fails, all ranks do.

        Raises:
            MeshError: if the ranks' inputs differ; the message names them.
            RemoteRankError: if a streamer or a stopping criterion of any rank failed.
        """
        with fail_together(self):
            return self._generate(super().generate, *args, **kwargs)

    def _generate(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.tp_group.size == 1 or (_call.get() or _NOBODY).ranks == self.tp_group.global_ranks:
            return own(*args, **kwargs)  # an assistant's ranks are in step already
        arguments = _name_arguments(own, args, kwargs)
        with _in_step(self, arguments), same_inputs():
            return own(**arguments)

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        call = _call.get()
        if call is None or not (call.shares_stop or any(isinstance(one, MaxTimeCriteria) for one in criteria)):
            return criteria
        return _SharedCriteria(criteria, self.tp_group, call)

    def _get_static_cache_init_shape(self) -> Any:
        """(KV heads, head size), each a number or one for every layer, where transformers counts this rank's heads
        right; None elsewhere, so that a cache takes its shape from what it is given first.
        """
        shape = super()._get_static_cache_init_shape()
        for name, heads in self.tp_resolution.attention.items():
            counted, own = shape[0] if shape is not None else None, heads.kv.widths[self.tp_group.rank]
            if isinstance(counted, list):
                layer = getattr(self.get_submodule(name), "layer_idx", None)
                counted = counted[layer] if isinstance(layer, int) and layer < len(counted) else None
            if counted != own:
                return None
        return shape if self.tp_resolution.attention else None


@dataclass
class _Call:
    """One `generate` that is running."""

    ranks: list[int]
    """World ranks that run it."""
    shares_stop: bool = False
    """True if a rank has code of its user's in the loop: the ranks then agree in every step to stop or go on."""
    failure: Exception | None = None
    """The error that this rank's streamer raised."""


_NOBODY = _Call([])
_call: ContextVar[_Call | None] = ContextVar("generate", default=None)


@contextmanager
def _in_step(model: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Bring the ranks' random states together; put guards around what only some of them have."""
    group: TensorParallelGroup = model.tp_group
    marks = {name: mark(value) for name, value in arguments.items() if name not in OWN and value is not None}
    marks["generation_config"] = mark(arguments.get("generation_config") or getattr(model, "generation_config", None))
    streams, stops = (arguments.get(name) is not None for name in OWN)
    states = _random_states(model.device) if group.rank == 0 else None
    ranks = group.gather((marks, streams, stops, states))
    _check_marks([rank[0] for rank in ranks])
    if states is None:
        _set_random_states(model.device, ranks[0][3])
    streams, stops = (any(rank[which] for rank in ranks) for which in (1, 2))
    call = _Call(group.global_ranks, shares_stop=streams or stops)
    if streams:
        arguments["streamer"] = _GuardedStreamer(arguments.get("streamer"), call)
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)
    if streams:
        _agree_on_failure(group, call.failure)  # the last tokens


class _SharedCriteria(StoppingCriteriaList):
    """Stop a sequence where any rank would: clocks differ, and so may what users bring along.

    One all-reduce of a byte a sequence in every step.
    """

    def __init__(self, criteria: StoppingCriteriaList, group: TensorParallelGroup, call: _Call) -> None:
        super().__init__(criteria)
        self.group, self.call = group, call

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """(batch,) whether each sequence is done, the same on all ranks."""
        votes = torch.full((len(input_ids),), _FAILED, dtype=torch.uint8, device=self.group.device)
        failure = self.call.failure
        if failure is None:
            try:
                votes.copy_(super().__call__(input_ids, scores, **kwargs))
            except Exception as error:
                failure = error
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group.process_group)
        if (votes == _FAILED).any():
            _agree_on_failure(self.group, failure)
        return votes.to(input_ids.device, torch.bool)


class _GuardedStreamer(BaseStreamer):
    """A streamer whose failure is kept until all ranks can hear of it; on a rank without one, nothing."""

    def __init__(self, streamer: BaseStreamer | None, call: _Call) -> None:
        self.streamer, self.call = streamer, call

    def put(self, value: Tensor) -> None:
        """Hand on tokens."""
        self._do("put", value)

    def end(self) -> None:
        """Hand on that there will be no more."""
        self._do("end")

    def _do(self, method: str, *args: Any) -> None:
        if self.streamer is not None and self.call.failure is None:
            try:
                getattr(self.streamer, method)(*args)
            except Exception as error:
                self.call.failure = error


def _agree_on_failure(group: TensorParallelGroup, failure: Exception | None) -> None:
    """Raise on all ranks where one has failed."""
    with group.agree():
        if failure is not None:
            raise failure


def _name_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    signature = inspect.signature(function)
    arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def _check_marks(ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise MeshError, on all ranks, where they do not have the same marks."""
    for rank, marks in enumerate(ranks):
        names = sorted(name for name in marks.keys() | ranks[0].keys() if marks.get(name) != ranks[0].get(name))
        if names:
            raise MeshError(
                f"generate's {', '.join(names)}",
                got=f"one on rank 0 and another on rank {rank}",
                expected="the same on all ranks of a model",
                fix="Give them all the same prompts and settings; ranks that get different prompts need a model "
                'each: a device_mesh with a "dp" axis beside "tp".',
            )


def mark(value: Any) -> str:
    """A short text that differs where values do: by what is in tensors and in plain data, by type for all else."""
    return hashlib.blake2b(json.dumps(_outline(value), sort_keys=True).encode(), digest_size=16).hexdigest()


def _outline(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Tensor):
        data = local_tensor(value).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return [list(value.shape), str(value.dtype), hashlib.blake2b(data).hexdigest()]
    if hasattr(value, "to_dict"):  # a config
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _outline(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_outline(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(mark, value))
    if hasattr(value, "get_seq_length"):  # a cache, of this rank's heads
        return [type(value).__name__, _outline(value.get_seq_length())]
    return type(value).__name__


def _random_states(device: torch.device) -> list[Tensor]:
    """The states of the default generators of the CPU and of `device`."""
    return [random_state(each) for each in dict.fromkeys((torch.device("cpu"), device))]


def _set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    for each, state in zip(dict.fromkeys((torch.device("cpu"), device)), states, strict=True):
        set_random_state(each, state)
