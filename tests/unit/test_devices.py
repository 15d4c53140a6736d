"""The device of a rank in the tests of GPUs, on a stand-in for torch.cuda."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support import devices


@pytest.mark.parametrize(("rank", "index"), [(0, 0), (3, 1)])
def test_a_model_of_one_process_is_put_on_the_ranks_own_gpu(monkeypatch, rank, index) -> None:
    """Also before a group starts: the tensor-parallel model that it is compared with is there."""
    done: list[object] = []
    monkeypatch.setattr(devices, "IS_GPU", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", "")
    model = SimpleNamespace(to=done.append)
    devices.one_process("folder", SimpleNamespace(from_pretrained=lambda folder: model))
    assert done == [index, devices.DEVICE]
