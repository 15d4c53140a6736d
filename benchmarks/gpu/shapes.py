"""The model that the steps measure: Llama 3.1 8B's shape with random weights, on rank 0 of any number of ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

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

    # transformers takes the number of ranks from the environment, not from a mesh.
    with mock.patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(size)):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            yield init_device_mesh(job.kind, (size,), mesh_dim_names=("tp",))
        finally:
            torch._dynamo.reset()
            gc.collect()  # models are reference cycles
            dist.destroy_process_group()
            job.device.forget_peak()


def load(side: str, folder: Path, mesh: DeviceMesh, job: Job) -> Any:
    """The model on rank 0: "ours", "transformers" with its own tensor parallelism, or a "plain" one.

    Raises ValueError if it is elsewhere than on the job's device, or if transformers has not sharded it.
    """
    load = AutoModelForCausalLM.from_pretrained
    if side == "plain":
        model = load(folder, dtype=torch.bfloat16).to(job.kind)
    elif side == "transformers":
        model = load(
            folder, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_plan="auto", tp_size=mesh.size())
        )
    else:
        with tp_transformers.enable():
            model = load(folder, dtype=torch.bfloat16, tp_plan="auto", device_mesh=mesh)
    is_sharded = any(isinstance(param, DTensor) for param in model.parameters())
    if model.device.type != job.kind or (side == "transformers" and not is_sharded):
        raise ValueError(f"{side}: a model on {model.device}, sharded: {is_sharded}")
    return model
