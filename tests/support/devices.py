"""The device of the tests in tests/gpu: a GPU if there is one, else a CPU. Ranks on it, models on it, and its memory.

`DEVICE=cpu` chooses a CPU. Ranks that outnumber the GPUs share them; `BACKEND=nccl` lets them communicate by an NCCL
that allows several ranks on a GPU, else gloo sums for them, which must not all-gather DTensors on a GPU: torch ends the
process there (https://github.com/pytorch/pytorch/issues/152645).
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

from benchmarks.gpu.device import device_of
from tests.support.models import load

DEVICE = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
BACKEND = os.environ.get("BACKEND", "")
IS_GPU = DEVICE == "cuda"
allocated, peak, forget_peak = device_of(DEVICE).allocated, device_of(DEVICE).peak, device_of(DEVICE).forget_peak
SHARES_A_GPU = IS_GPU and torch.cuda.device_count() < 2 and BACKEND != "nccl"
"""True if two ranks share a GPU and communicate by gloo."""


def start(*axes: int, names: tuple[str, ...] = ("tp",)) -> DeviceMesh:
    """Run on every rank: the mesh of all ranks, of these sizes; all ranks on the axis `tp` unless given."""
    size, backend = int(os.environ["WORLD_SIZE"]), "gloo"
    _take_device()
    if IS_GPU:
        backend = f"cpu:gloo,cuda:{BACKEND or ('nccl' if size <= torch.cuda.device_count() else 'gloo')}"
    if not dist.is_initialized():
        dist.init_process_group(backend)
    return init_device_mesh(DEVICE, axes or (size,), mesh_dim_names=names)


def _take_device() -> None:
    """Let this rank compute on its own GPU."""
    if IS_GPU:
        index = int(os.environ["RANK"]) % torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(index)
        torch.cuda.set_device(index)
        torch.backends.cudnn.allow_tf32 = False  # convolutions in fp32, as on a CPU


def load_here(folder: str, auto: Any = AutoModelForCausalLM, mesh: DeviceMesh | None = None, **arguments: Any) -> Any:
    """Run on every rank: the tensor-parallel model on the ranks' devices."""
    return load(folder, auto, device_mesh=start() if mesh is None else mesh, **arguments)


def one_process(folder: str, auto: Any = AutoModelForCausalLM, **arguments: Any) -> Any:
    """The unsharded model, on this rank's device."""
    _take_device()
    return auto.from_pretrained(folder, **arguments).to(DEVICE)
