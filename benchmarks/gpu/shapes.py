"""The model that the steps measure: Llama 3.1 8B's shape with random weights, on rank 0 of any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import tp_transformers

from .. import checkpoints
from ..ranks import joined
from .step import Job, Lines

MODEL, GIGABYTES, REHEARSED = "llama-8b", 16.1, 0.013
"""Layout of the checkpoint, its 10^9 bytes, and those of a rehearsal."""


def measure(job: Job, lines: Lines) -> None:
    """Write the checkpoint, while a step that does not need it runs."""
    lines.measure("checkpoint", lambda: {"folder": str(checkpoint(job))})


def checkpoint(job: Job) -> Path:
    """The folder of the checkpoint; written unless it exists."""
    return checkpoints.ensure(MODEL, REHEARSED if job.rehearses else GIGABYTES, Path(job.folder))


@contextmanager
def rank_zero(job: Job, size: int) -> Iterator[DeviceMesh]:
    """The mesh of rank 0 of `size`; collectives return at once (torch's fake backend)."""
    job.device.forget_peak()
    # transformers takes the number of ranks from the environment, not from a mesh.
    environment = mock.patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(size))
    with environment, joined("", 0, size, job.kind) as mesh:
        try:
            yield mesh
        finally:
            torch._dynamo.reset()


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
