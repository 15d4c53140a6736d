"""Blocks of shards that are sent to rank 0, on a stand-in for a GPU: by the backend that can send them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tp_transformers.ranks import messages
from tp_transformers.slices.layout import Layout, chunked
from tp_transformers.strategies.shards import gather

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
def test_blocks_are_sent_from_the_cpu_where_gloo_is(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str, rank: int
) -> None:
    moved: list[str] = []
    group: Any = SimpleNamespace(rank=rank, process_group=object(), device=GPU)
    monkeypatch.setattr(messages, "get_backend_config", lambda group: backend)
    monkeypatch.setattr(gather.dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(gather.dist, "send", lambda block, **_: moved.append(block.device.type))
    monkeypatch.setattr(gather.dist, "recv", lambda block, **_: moved.append(block.device.type))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, values: into)  # a tensor of the stand-in has no values
    gather.on_first(torch.ones(4, 6), (8, 6), Layout(0, chunked(8, 2)), group, None)
    assert moved == [device]
