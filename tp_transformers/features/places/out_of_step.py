"""The error of ranks that have begun different collectives or calls."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...errors import MeshError
from .place import inputs_of_this_thread, of_this_thread


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
