"""Strategies that are wrong, and ranks of `verify` in the workers of the pool."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.pool import Pool
from tp_transformers.ranks.collectives import reduce_from_region
from tp_transformers.strategies import STRATEGIES, ColwiseParallel, ReplicateParallel, RowwiseParallel, get_tensor_shard

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1000,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


class NoSum(RowwiseParallel):
    """Leaves every rank with its part of the sum."""

    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, mesh: Any) -> Any:
        return outputs


class Summed(ReplicateParallel):
    """Sums what is whole."""

    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, mesh: Any) -> Any:
        return reduce_from_region(outputs, mesh.get_group())


class Deaf(ColwiseParallel):
    """Does not sum the gradient of its input."""

    @staticmethod
    def _prepare_input_fn(input_layouts: Any, desired: Any, mod: Any, inputs: Any, mesh: Any) -> Any:
        return inputs


class Swapped(ColwiseParallel):
    """Gives every rank the features of another."""

    def partition_tensor(self, param: Any, empty: Any, kind: str, dtype: Any, to: bool, rank: int, mesh: Any) -> Any:
        return get_tensor_shard(param, empty, mesh, mesh.size() - 1 - rank, 0)


class OneRaises(ColwiseParallel):
    """Raises on rank 1 alone, when the others have long gone on to wait for it."""

    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, mesh: Any) -> Any:
        if mesh.get_local_rank() == 1:
            raise ValueError("not today")
        return outputs


OWN = {"no_sum": NoSum, "summed": Summed, "swapped": Swapped, "deaf": Deaf, "one_raises": OneRaises}


@contextmanager
def kept() -> Iterator[None]:
    """After the block, the registered strategies are those of before."""
    before = dict(STRATEGIES)
    try:
        yield
    finally:
        STRATEGIES.clear()
        STRATEGIES.update(before)


@pytest.fixture
def registered() -> Iterator[Callable[[str, Any], None]]:
    """A function that registers a strategy until the test ends."""
    with kept():
        yield STRATEGIES.register_strategy


@pytest.fixture
def own_strategies(registered: Callable[[str, Any], None]) -> None:
    for name, strategy in OWN.items():
        registered(name, strategy)


def changed(folder: Path, model_type: str, rules: dict[str, Any], section: str = "base_model") -> Path:
    """The architecture's plan with other rules in it."""
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({"model_type": model_type, "extends": model_type, section: rules}))
    return path


def rank(*arguments: Any) -> None:
    """A rank of `verify` in a worker of the pool."""
    from tp_transformers.features.verify import rank as rank_module  # not there without what it requires

    with kept():
        rank_module.run_rank(*arguments)


@pytest.fixture
def in_pool(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verify's ranks be workers that run already."""
    from tp_transformers.features.verify import rank as rank_module
    from tp_transformers.features.verify import verify

    def run(program: Any, *, ranks: int, timeout: float, output: Any) -> int:
        assert list(program[:2]) == ["-m", rank_module.__name__]
        folder, reports, deadline = program[2:]
        pool.run(ranks, rank, Path(folder), Path(reports), float(deadline), timeout=timeout)
        return 0

    monkeypatch.setattr(verify, "torchrun", run)
