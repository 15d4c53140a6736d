"""`generate` on the ranks of one model, which share a random state, a prompt and the decision to stop.

Each rank decodes by itself, from logits that are the same on all. Ranks stay in step as long as nothing that differs
between them gets into the loop. So they share random states at the start, and in every step the results of clocks and
of user code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partialmethod
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, MaxTimeCriteria, StoppingCriteriaList

from ..errors import MeshError
from ..plans.bind import Resolution
from ..ranks import direct
from ..ranks.group import TensorParallelGroup, agreed
from ..seams import Mixin, collective
from ..transformers_api import BaseStreamer
from .dropout import random_states, set_random_states

OWN = ("streamer", "stopping_criteria")
"""Arguments of `generate` that may be given to some ranks only."""
CHOOSING = ("logits_processor", "prefix_allowed_tokens_fn")
"""Arguments of `generate` with user code that changes which tokens are taken."""

_FAILED = 2
"""Vote of a rank that failed; 1 is stop, 0 is go on."""


class TensorParallelGeneration(Mixin):
    """Methods of a model that can generate, overridden so that its ranks stay in step."""

    tp_group: TensorParallelGroup
    tp_resolution: Resolution

    @collective
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The `generate` of the model's own class, which all ranks call with the same inputs.

        Every rank draws the numbers of one process with rank 0's random state. A streamer or stopping criteria may be
        given to some ranks only: if one of them stops or fails, all ranks do.

        Raises:
            MeshError: tokens that user code chose differ between ranks; the message names them.
            RemoteRankError: a streamer or a stopping criterion of any rank failed.
        """
        return self._generate(super().generate, *args, **kwargs)

    def _generate(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = _call.get()
        if self.tp_group.size == 1 or (call is not None and call.ranks == self.tp_group.global_ranks):
            return own(*args, **kwargs)  # nested, as for an assistant: its ranks are in step already
        names = _names(own, len(args), kwargs)
        arguments = {**dict(zip(names, args, strict=True)), **kwargs}
        with _in_step(self, arguments):
            given = [arguments.pop(name) for name in names]
            return own(*given, **arguments)

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        criteria, call = super()._get_stopping_criteria(*args, **kwargs), _call.get()
        if call is not None and (call.shares_steps or any(isinstance(each, MaxTimeCriteria) for each in criteria)):
            return _SharedCriteria(criteria, self.tp_group, call)
        return criteria

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Drafts of an assistant are not cut short by its clock, which differs between ranks."""
        generator = super()._get_candidate_generator(*args, **kwargs)
        if (config := getattr(generator, "generation_config", None)) is not None:
            config.max_time = None
        return generator

    def _get_static_cache_init_shape(self) -> Any:
        """(KV heads, head size), each a number or a list per layer, if transformers counts this rank's heads right.

        Else None: the cache then takes its shape from its first input.
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
class _Call(BaseStreamer):
    """A running `generate`. In the place of a streamer, it keeps the error of that until all ranks can raise."""

    ranks: list[int]
    """World ranks of the model."""
    streamer: BaseStreamer | None
    """The streamer of this rank."""
    shares_steps: bool
    """True if some rank runs user code in the loop: ranks then compare tokens, and agree to stop or go on, in every
    step."""
    chooses: tuple[str, ...]
    """Names of user code that changes which tokens are taken."""
    failure: Exception | None = None
    """The error of the streamer."""

    def _do(self, method: str, *args: Any) -> None:
        if self.streamer is not None and self.failure is None:
            try:
                getattr(self.streamer, method)(*args)
            except Exception as error:
                self.failure = error

    put, end = partialmethod(_do, "put"), partialmethod(_do, "end")


_call: ContextVar[_Call | None] = ContextVar("generate", default=None)


@contextmanager
def _in_step(model: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Share rank 0's random states, and guard the calls that only some ranks have."""
    group: TensorParallelGroup = model.tp_group
    given = [arguments.get(name) is not None for name in OWN]
    states = random_states(model.device) if group.rank == 0 else None
    everyone = group.gather((given, states, model._tp_sample(arguments)))
    given_by_rank, (first_states, *_), samples = zip(*everyone, strict=True)
    model._tp_compare(samples)
    if states is None:
        set_random_states(model.device, first_states)
    streams, stops = map(any, zip(*given_by_rank, strict=True))
    chooses = _chooses(arguments)
    call = _Call(group.global_ranks, arguments.get("streamer"), bool(streams or stops or chooses), chooses)
    if streams:
        arguments["streamer"] = call
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)
    if streams:
        _agree_on_failure(group, call.failure)  # a failure on the last tokens


class _SharedCriteria(StoppingCriteriaList):
    """Stop a sequence if any rank would, and raise if ranks took different tokens.

    Clocks differ between ranks, and user code may. One all-reduce of three numbers per sequence in every step.
    """

    def __init__(self, criteria: StoppingCriteriaList, group: TensorParallelGroup, call: _Call) -> None:
        super().__init__(criteria)
        self.group, self.call = group, call

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """(batch,) True for a sequence that is done, the same on all ranks."""
        votes = torch.full((3, len(input_ids)), _FAILED, dtype=torch.int64, device=self.group.device)
        votes[1] = (input_ids * torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)).sum(-1)  # a checksum
        votes[2] = -votes[1]
        failure = self.call.failure
        if failure is None:
            try:
                votes[0].copy_(super().__call__(input_ids, scores, **kwargs))
            except Exception as error:
                failure = error
        direct.all_reduce(votes, self.group.process_group, direct.MAX)
        if (votes[0] == _FAILED).any():
            _agree_on_failure(self.group, failure)
        if (votes[1] != -votes[2]).any():
            _raise_different(self.group.gather(input_ids.tolist()), self.call)
        return votes[0].to(input_ids.device, torch.bool)


def _raise_different(ranks: Sequence[list[list[int]]], call: _Call) -> None:
    """Raise MeshError, on all ranks, at the first token that is not rank 0's; `ranks`: (batch, length) of each rank."""
    for rank, rows in enumerate(ranks):
        for row, (first, own) in enumerate(zip(ranks[0], rows, strict=True)):
            place = next((at for at, (a, b) in enumerate(zip_longest(first, own)) if a != b), None)
            if place is None:
                continue
            first_id, own_id = ("none" if place >= len(tokens) else str(tokens[place]) for tokens in (first, own))
            code = f"{' and '.join(call.chooses)} may draw" if call.chooses else "Your code in generate may have drawn"
            raise agreed(
                MeshError(
                    "generate's tokens",
                    got=f"{first_id} on rank 0 and {own_id} on rank {rank}, at position {place} of sequence {row}",
                    expected="the same on all ranks of a model",
                    fix=f"{code} random numbers that differ: ranks share the default generators of torch, numpy and "
                    "random; seed a generator of your own identically on all of them.",
                )
            )


def _chooses(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the user code that changes which tokens are taken."""
    names = []
    for name in CHOOSING:
        value = arguments.get(name)
        names += [type(item).__name__ for item in value] if isinstance(value, list) else [name] if value else []
    return tuple(names)


def _agree_on_failure(group: TensorParallelGroup, failure: Exception | None) -> None:
    """Raise on all ranks if one has failed."""
    with group.agree():
        if failure is not None:
            raise failure


def _names(function: Any, count: int, keywords: Mapping[str, Any]) -> list[str]:
    """Names of the first `count` positional arguments of a `generate`, none of them in `keywords`.

    A class may pass `*args` on to transformers' method, whose names they then have.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    names += [*inspect.signature(GenerationMixin.generate).parameters][len(names) + 1 :]  # after `self`
    return [names[at] if at < len(names) and names[at] not in keywords else f"argument {at + 1}" for at in range(count)]
