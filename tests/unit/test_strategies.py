"""Every strategy's slicing: cut for all ranks, undone, equal to the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tp_transformers.lazy import LazyTensor, Resident
from tp_transformers.strategies import STRATEGIES


class FakeMesh:
    """As much of a DeviceMesh as slicing needs."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


MODULES = {
    "linear": lambda: nn.Linear(10, 14),
    "embedding": lambda: nn.Embedding(23, 6, padding_idx=3),
}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_undo_of_all_partitions_is_the_original(name: str, kind: str, size: int) -> None:
    module = MODULES[kind]()
    parts = (12, 11) if name == "packed_rowwise" and kind == "embedding" else None
    layer = STRATEGIES[name].bind(module, size, parts=parts)
    for param_type, param in module.named_parameters():
        whole = param.detach()
        shards = []
        for rank in range(size):
            lazy = layer.partition_tensor(Resident(whole), whole, param_type, None, True, rank, FakeMesh(size))
            real = layer.partition_tensor(whole, whole, param_type, torch.float64, True, rank, FakeMesh(size))
            assert isinstance(lazy, LazyTensor)
            assert real.dtype == torch.float64
            assert real.is_contiguous()
            assert torch.equal(lazy.materialize().double(), real)
            shards.append(lazy.materialize())
        assert torch.equal(layer.undo_partition(shards, param_type, whole.shape), whole)
        if not name.startswith("replicate") and whole.ndim > 1:
            assert sum(shard.numel() for shard in shards) == whole.numel()


@pytest.mark.parametrize(
    ("parts", "says"),
    [(None, "not 2 equal parts"), (3, "not 3 equal parts"), ((4, 4), "add up to 8"), (("query", "key"), "not lengths")],
)
def test_packed_parts_that_do_not_fit(parts: Any, says: str) -> None:
    layer = STRATEGIES["packed_colwise"].bind(nn.Linear(4, 7), 2, parts=parts)
    with pytest.raises(ValueError, match=says):
        layer.layout("weight", (7, 4), 2)


@pytest.mark.parametrize(
    ("name", "kind", "rows_of_rank_1"),
    [
        ("colwise", "linear", (slice(5, 10), slice(None))),
        ("rowwise", "linear", (slice(None), slice(4, 7))),
        ("embedding_rowwise", "embedding", (slice(8, 16), slice(None))),
        ("embedding_colwise", "embedding", (slice(None), slice(2, 4))),
    ],
)
def test_what_rank_1_of_3_holds(name: str, kind: str, rows_of_rank_1: Any) -> None:
    module = MODULES[kind]()
    whole = module.weight.detach()
    got = STRATEGIES[name].bind(module, 3).partition_tensor(whole, whole, "weight", None, True, 1, FakeMesh(3))
    assert torch.equal(got, whole[rows_of_rank_1])


def test_what_rank_1_of_2_holds_of_packed_parts() -> None:
    whole = torch.arange(14.0)[:, None]
    strategy = STRATEGIES["packed_colwise"].bind(nn.Linear(1, 14), 2, parts=(4, 10))
    got = strategy.partition_tensor(whole, whole, "weight", None, True, 1, FakeMesh(2))
    assert got.flatten().tolist() == [2, 3, 9, 10, 11, 12, 13]
