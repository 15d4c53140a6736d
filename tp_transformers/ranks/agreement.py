"""Errors that all ranks raise: their mark, and the one of ranks that have begun different collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from ..errors import MeshError
from ..marks import Mark
from .watching.place import inputs_of_this_thread, of_this_thread

E = TypeVar("E", bound=Exception)

_AGREED: Mark[bool] = Mark("_agreed_on")
"""Mark on an error: all ranks raise it."""


def agreed(error: E) -> E:
    """Mark an error that all ranks raise, so that `TensorParallelGroup.agree` lets it pass without a vote."""
    _AGREED.put(error, True)
    return error


def is_agreed(error: BaseException) -> bool:
    """True if all ranks raise `error`."""
    return bool(_AGREED.find(error))


def this_collective(kind: str, x: object) -> str:
    """The collective of `x` that this thread has begun: "all_reduce of float32 (2, 6, 48) in forward (...)"."""
    name = f"{kind} of {str(x.dtype)[6:]} {tuple(x.shape)}" if isinstance(x, Tensor) else "a vote"
    return f"{name} in {this_call()}"


def this_call() -> str:
    """The call of this package that this thread makes: "forward (train.py:12: model(ids)) with ids int64 (2, 6)"."""
    place, inputs = of_this_thread(), inputs_of_this_thread()
    where = f"{place.call} ({place.line})" if place.call else place.line
    return where + f" with {', '.join(inputs)}" * bool(inputs)


def out_of_step(texts: Sequence[str]) -> MeshError:
    """The error of ranks in different collectives or calls. `texts`: that of each rank."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    return MeshError(
        "the ranks of a model",
        got="; ".join(f"{text} on rank {' and '.join(names)}" for text, names in ranks.items()),
        expected="the same on all of them",
        fix="Give all ranks of a model the same inputs, of one size, length and dtype, and call it equally often: "
        "DistributedSampler(dataset, num_replicas=dp_size, rank=dp_rank); batches of their own need a dp axis.",
    )
