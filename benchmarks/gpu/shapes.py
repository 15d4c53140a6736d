"""The model that the steps measure: Llama 3.1 8B's shape with random weights, on rank 0 of any number of ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

import tp_transformers

from .. import checkpoints
from .step import Job

MODEL, GIGABYTES, REHEARSED = "llama-8b", 16.1, 0.013
"""Layout of the checkpoint, its 10^9 bytes, and those of a rehearsal."""


def checkpoint(job: Job) -> Path:
    """The folder of the checkpoint; written unless it exists."""
    return checkpoints.ensure(MODEL, REHEARSED if job.rehearses else GIGABYTES, Path(job.folder))


@contextmanager
def rank_zero(job: Job, size: int) -> Iterator[DeviceMesh]:
    """The mesh of rank 0 of `size`; collectives return at once (torch's fake backend)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh(job.kind, (size,), mesh_dim_names=("tp",))
    finally:
        gc.collect()  # models are reference cycles
        dist.destroy_process_group()
        torch._dynamo.reset()
        job.device.forget_peak()


def load(side: str, folder: Path, mesh: DeviceMesh, job: Job) -> Any:
    """The model on rank 0: "ours", "transformers" with its own tensor parallelism, or a "plain" one."""
    load = AutoModelForCausalLM.from_pretrained
    if side == "plain":
        return load(folder, dtype=torch.bfloat16).to(job.kind)
    if side == "transformers":
        return load(folder, dtype=torch.bfloat16, tp_plan="auto", device_mesh=mesh)
    with tp_transformers.enable():
        return load(folder, dtype=torch.bfloat16, tp_plan="auto", device_mesh=mesh)
