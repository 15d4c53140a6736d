"""The machine: devices, driver, topology, releases, speed limits; and sums of ranks, by NCCL if the ranks can."""

from __future__ import annotations

import io
import shutil
import subprocess
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch

from tp_transformers.commands import cli
from tp_transformers.ranks import direct
from tp_transformers.ranks.mesh import join

from .. import processes
from ..machine import facts
from ..ranks import joined
from .device import device_of
from .step import MARGIN, Job, Lines

SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
"""Variables by which NCCL 2.30 and later takes several ranks of one GPU."""
LIMIT = 30.0
"""Seconds for ranks that sum."""
RESULT = "backend"
COUNT = 30
"""Sums that are timed, one after the other."""
NBYTES = (8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20)
"""Bytes of a sum."""
QUERY = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,mig.mode.current"


def measure(job: Job, lines: Lines) -> None:
    """Facts first: they cost nothing. Then the sums: ranks are copies of a process that does not use the GPU yet."""
    lines.measure("machine", facts)
    lines.measure("sums", lambda: sums(job))
    lines.measure("limits", lambda: _limits(job))
    lines.measure("devices", lambda: _devices(job))
    lines.measure("tp-transformers env", _env)


def sums(job: Job) -> dict[str, Any]:
    """Seconds of sums by bytes, of a rank for each GPU, or two on one: by NCCL if it can, else by gloo."""
    size = max(job.devices, 2)
    found: dict[str, Any] = {"ranks": size}
    for backend in ("nccl", "gloo") if job.kind == "cuda" else ("gloo",):
        try:
            results = _ranks(job, backend, size)
        except processes.ProcessError as error:
            if backend == "gloo":
                raise
            found["why"] = " ".join(str(error).split())[-300:]
        else:
            return {**found, "backend": backend, **{size: max(each[size] for each in results) for size in results[0]}}
    raise AssertionError("the last backend has returned or raised")


def _ranks(job: Job, backend: str, size: int) -> list[dict[str, Any]]:
    nbytes = NBYTES[:2] if job.rehearses else NBYTES
    return processes.run_ranks(
        f"{__name__}:summing",
        {"kind": job.kind, "backend": backend, "size": size, "nbytes": nbytes},
        timeout=min(LIMIT, job.left - MARGIN),
        env=SHARED if size > job.devices else {},
        copy=job.copies,
    )


def summing(kind: str, backend: str, store: str, size: int, rank: int, nbytes: list[int]) -> dict[str, Any]:
    """One of the ranks: seconds of a sum by its bytes, after a check."""
    device, seconds = device_of(kind), {}
    with joined(store, rank, size, kind, backend) as mesh:
        group = join(mesh).process_group
        for count in nbytes:
            x = torch.arange(count // 2, device=kind).remainder(8).to(torch.bfloat16)
            total = x * (rank + 1)
            direct.all_reduce(total, group)
            if not torch.equal(total, x * (size * (size + 1) // 2)):
                raise ValueError(f"a wrong sum of {count} bytes")
            step = partial(direct.all_reduce, torch.zeros_like(x), group)
            device.seconds(step, 5)
            seconds[f"{count >> 10} KB, us"] = device.seconds(step, COUNT) * 1e6
    return seconds


def _env() -> dict[str, Any]:
    """What `tp-transformers env` prints."""
    with redirect_stdout(io.StringIO()) as printed:
        cli.main(["env"])
    return {"text": printed.getvalue()}


def _devices(job: Job) -> dict[str, Any]:
    """Names, peer access, multicast, NCCL, and the tables of nvidia-smi."""
    if job.kind != "cuda":
        return {"devices": [job.device.name()]}
    count = torch.cuda.device_count()
    return {
        "devices": [torch.cuda.get_device_name(index) for index in range(count)],
        "capability": list(torch.cuda.get_device_capability()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cuda": torch.version.cuda,
        "peers": [[a != b and torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)],
        "multicast": _multicast(),
        "query": _output(job, "nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"),
        "topology": _output(job, "nvidia-smi", "topo", "-m"),
    }


def _multicast() -> bool | None:
    """True if the GPU supports multicast (NVLink SHARP); None if this torch cannot tell."""
    from torch._C import _autograd, _distributed_c10d

    symmetric = getattr(_distributed_c10d, "_SymmetricMemory", None)
    return bool(symmetric.has_multicast_support(_autograd.DeviceType.CUDA, 0)) if symmetric is not None else None


def _limits(job: Job) -> dict[str, Any]:
    """Bytes a second from pinned memory and within the device; operations a second of a product in bf16."""
    device, size = job.device, (1 << 8 if job.rehearses else 1 << 13)
    nbytes = size * size * 4
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=job.kind == "cuda")
    target, source = (torch.empty(nbytes, dtype=torch.uint8, device=job.kind) for _ in range(2))
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=job.kind) for _ in range(2))
    steps = {
        "from pinned memory, GB/s": (lambda: target.copy_(pinned, non_blocking=True), nbytes / 1e9),
        "within the device, GB/s": (lambda: target.copy_(source), 2 * nbytes / 1e9),
        "bf16, TFLOP/s": (lambda: left @ right, 2 * size**3 / 1e12),
    }
    found = {}
    for name, (step, amount) in steps.items():
        device.seconds(step, 3)
        found[name] = amount / device.seconds(step, 10)
    return found


def _output(job: Job, *command: str) -> str:
    """The command's output; empty if it does not exist."""
    if shutil.which(command[0]) is None:
        return ""
    limit = max(job.left - MARGIN, 1.0)
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, cwd=processes.ROOT)
    return done.stdout + done.stderr
