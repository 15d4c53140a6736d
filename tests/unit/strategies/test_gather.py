"""Blocks of shards that are sent to rank 0, on a stand-in for a GPU: by the backend that can send them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tp_transformers import UnsupportedError
from tp_transformers.slices.layout import Layout, chunked
from tp_transformers.strategies import take
from tp_transformers.strategies.shards import gather, tensors
from tp_transformers.strategies.shards.shard import ParamShard

GPU = torch.device("meta")
"""Stand-in for the device of the ranks."""


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),  # gloo's send would read the GPU's address as one of the CPU
        ("cpu:gloo,cuda:nccl", "cpu"),  # NCCL's makes a communicator for each pair of ranks
        ("cuda:nccl", "meta"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_are_sent_from_the_cpu_where_gloo_is(monkeypatch, backend, device, rank) -> None:
    moved: list[str] = []
    group: Any = object()
    monkeypatch.setattr("tp_transformers.ranks.group.get_backend_config", lambda group: backend)
    monkeypatch.setattr(gather.dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(gather.dist, "send", lambda block, **_: moved.append(block.device.type))
    monkeypatch.setattr(gather.dist, "recv", lambda block, **_: moved.append(block.device.type))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, values: into)  # a tensor of the stand-in has no values
    gather.on_first(torch.ones(4, 6), (8, 6), Layout(0, chunked(8, 2)), group, GPU)
    assert moved == [device]


@pytest.mark.parametrize("limit", [1, 4, 6, 7, 12, 13, 24, 1000])
def test_blocks_cover_a_shard_once_and_are_no_larger_than_the_limit(limit) -> None:
    whole, layout = torch.arange(5 * 4 * 6).view(5, 4, 6), Layout(1, chunked(4, 3))
    for rank in range(3):
        shard = take(whole, layout, rank)
        times = torch.zeros_like(shard)
        for in_full, in_shard in gather.split_blocks(whole.shape, layout, rank, limit=limit):
            assert torch.equal(whole[in_full], shard[in_shard])
            assert shard[in_shard].numel() <= limit
            times[in_shard] += 1
        assert (times == 1).all()


def test_where_no_feature_computes_a_shard_computes_elementwise_alone() -> None:
    group: Any = SimpleNamespace(rank=1, size=2, device_mesh=object())
    shard = ParamShard(torch.Size((4, 2)), Layout(0, chunked(4, 2)), group, use_dtensor=False)
    param = shard.wrap(torch.ones(2, 2), requires_grad=False)
    double = tensors._on_values(tensors.ShardTensor, torch.mul, (2.0, param), {})
    assert type(double) is tensors.ShardTensor
    assert double.tp_shard is shard
    assert torch.equal(tensors.local_values(double), torch.full((2, 2), 2.0))
    with pytest.raises(UnsupportedError, match="sum on a tensor-parallel parameter"):
        tensors._on_values(tensors.ShardTensor, torch.sum, (param,), {})
