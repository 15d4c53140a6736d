"""Threads that prefetch, and the memory that a prefetch may take."""

from dataclasses import replace

import torch
from safetensors.torch import save_file

from tests.unit.ranks.test_threads import GPU, Device, device, group  # noqa: F401 - fixtures
from tp_transformers.checkpoint.reading import jobs
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.features.page_cache import prefetch


def test_threads_that_prefetch(device, group, tmp_path) -> None:  # noqa: F811
    save_file({"x": torch.arange(4096.0)}, tmp_path / "x.safetensors")
    with Checkpoint([tmp_path / "x.safetensors"]) as checkpoint:
        request = jobs.Request(checkpoint.tensors["x"], torch.empty(4096))
        with prefetch.prefetching(checkpoint.opened, [request], group, wanted=True):
            pass
    assert any(name.startswith("prefetch") for name in device.of_others())
    assert all(calls[0] == ("set_device", GPU) for calls in device.of_others().values())


def test_weights_on_a_gpu_take_no_memory_of_the_page_cache(device, group, tmp_path, monkeypatch) -> None:  # noqa: F811
    """Two ranks read 16 KiB into weights of 16 KiB each: 48 KiB on CPUs, 16 KiB with weights on GPUs."""
    save_file({"x": torch.arange(4096.0)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(prefetch, "available_memory", lambda: 40 << 10)
    read: dict[str, int] = {}
    for ranks in (replace(group, device=torch.device("cpu")), group):
        with Checkpoint([tmp_path / "x.safetensors"]) as checkpoint:
            request = jobs.Request(checkpoint.tensors["x"], torch.empty(4096, device="meta"))  # as of a later round
            with prefetch.prefetching(checkpoint.opened, [request], ranks, wanted=True) as counts:
                read[ranks.device.type] = counts["prefetched"]
    assert read["cpu"] == 0
    assert read["cuda"] > 0
