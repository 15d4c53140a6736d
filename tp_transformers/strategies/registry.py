"""Names of strategies; a new one is a class in a file of this folder, and a line in `CORE`, or is of a feature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any

from torch.distributed.tensor import Replicate

from ..errors import PlanError
from ..seams import features, first
from .base import TensorParallelLayer
from .experts import MoEExpertsParallel
from .linear import ColwiseParallel, PackedColwiseParallel, PackedRowwiseParallel, RowwiseParallel
from .local import (
    AllReduceParallel,
    GatherParallel,
    LocalColwiseParallel,
    LocalPackedColwiseParallel,
    LocalPackedRowwiseParallel,
    LocalRowwiseParallel,
)
from .replicate import ReplicateParallel, ReplicateSumGradParallel

CORE: dict[str, TensorParallelLayer] = {
    "colwise": ColwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    "packed_colwise": PackedColwiseParallel(),
    "packed_rowwise": PackedRowwiseParallel(),
    "embedding_rowwise": RowwiseParallel(),
    "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
    "local_colwise": LocalColwiseParallel(use_dtensor=False),
    "local_rowwise": LocalRowwiseParallel(use_dtensor=False),
    "local_packed_colwise": LocalPackedColwiseParallel(use_dtensor=False),
    "local_packed_rowwise": LocalPackedRowwiseParallel(use_dtensor=False),
    "gather": GatherParallel(),
    "replicate": ReplicateParallel(),
    # Names in the plans that classes of transformers 5 declare.
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": ReplicateSumGradParallel(),
    "all_reduce": AllReduceParallel(),
    "moe_tp_experts": MoEExpertsParallel(),
    "ep_router": ReplicateParallel(),
    "local_params": TensorParallelLayer(),
}


@cache
def built_in() -> Mapping[str, TensorParallelLayer]:
    """The strategies of this package by name: those of the core, and of features."""
    names = dict(CORE)
    for feature in features().values():
        names.update(feature.strategies())
    return names


@cache
def _known() -> dict[str, TensorParallelLayer]:
    """Built-in strategies, and those that users register."""
    return dict(built_in())


def _of_feature(value: Any) -> TensorParallelLayer | None:
    return first((feature.strategy_of(value) for feature in features().values()), None)


def as_strategy(value: Any) -> Any:
    """The strategy that a feature makes of an object in a plan; any other value, and a name, as it is.

    Raises PlanError for an object that looks like a strategy and would not work.
    """
    return value if isinstance(value, str) else _of_feature(value) or value


class ParallelInterface(MutableMapping[str, TensorParallelLayer]):
    """Mapping of names to strategies: built-in ones and those of `register_strategy`; all instances share it."""

    @classmethod
    def register_strategy(cls, name: str, strategy: TensorParallelLayer | type[TensorParallelLayer]) -> None:
        """Make `strategy` (a class or an instance) available to plans as `name`; replaces an earlier one."""
        cls()[name] = strategy

    register = register_strategy

    def valid_keys(self) -> list[str]:
        """All names, as in transformers' interface."""
        return list(self)

    def find(self, name: str) -> TensorParallelLayer | None:
        """The strategy `name`, from here or from a feature that knows the name; None without one."""
        return self[name] if name in self else _of_feature(name)

    def __setitem__(self, name: str, strategy: TensorParallelLayer | type[TensorParallelLayer]) -> None:
        instance = as_strategy(strategy() if isinstance(strategy, type) else strategy)
        if not isinstance(instance, TensorParallelLayer):
            raise PlanError(
                f"strategy {name!r}",
                got=repr(strategy),
                expected="a TensorParallelLayer class or instance, or a style of torch or of transformers",
                fix="Inherit from tp_transformers.strategies.TensorParallelLayer.",
            )
        _known()[name] = instance

    def __getitem__(self, name: str) -> TensorParallelLayer:
        return _known()[name]

    def __delitem__(self, name: str) -> None:
        del _known()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_known())

    def __len__(self) -> int:
        return len(_known())


STRATEGIES = ParallelInterface()
"""The strategies that plans can name."""
