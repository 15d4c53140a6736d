"""The machine: devices, driver, topology, releases, speed limits; and how ranks on one GPU can communicate."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from typing import Any

import torch

from .. import processes
from ..machine import facts
from .reckoned import Gpu
from .step import MARGIN, Job, Lines

SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
"""Variables by which NCCL 2.30 and later takes several ranks of one GPU."""
PROBE = 30.0
"""Seconds for two ranks that sum."""
QUERY = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,mig.mode.current"


def measure(job: Job, lines: Lines) -> None:
    """Facts first: they cost nothing."""
    lines.measure("machine", facts)
    lines.measure("devices", lambda: _devices(job))
    lines.measure("ranks that share a device", lambda: _probe(job))
    lines.measure("limits", lambda: _limits(job))
    lines.measure("tp-transformers env", lambda: {"text": _output(job, sys.executable, "-m", "tp_transformers", "env")})


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
        "to_device": (lambda: target.copy_(pinned, non_blocking=True), nbytes),
        "memory": (lambda: target.copy_(source), 2 * nbytes),
        "operations": (lambda: left @ right, 2 * size**3),
    }
    found = {}
    for name, (step, amount) in steps.items():
        device.seconds(step, 3)
        found[name] = amount / device.seconds(step, 10)
    return found


def _probe(job: Job) -> dict[str, Any]:
    """The backend by which two ranks sum on one device: "nccl" if it can, else "gloo" and NCCL's error."""
    if job.kind == "cuda" and torch.cuda.device_count() > 1:
        return {"backend": "nccl", "why": "a device for each rank"}
    backend = "nccl" if job.kind == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as scratch:
        shared = {"kind": job.kind, "backend": backend, "store": f"{scratch}/store", "size": 2, "nbytes": [8192]}
        timeout = min(PROBE, job.left - MARGIN)
        try:
            processes.run(
                "benchmarks.gpu.summing",
                [{**shared, "rank": rank} for rank in range(2)],
                timeout=timeout,
                env=[SHARED, SHARED],
            )
        except processes.ProcessError as error:
            if job.kind != "cuda":
                raise
            return {"backend": "gloo", "why": " ".join(str(error).split())[-300:]}
    return {"backend": backend}


def _output(job: Job, *command: str) -> str:
    """The command's output; empty if it does not exist."""
    if shutil.which(command[0]) is None:
        return ""
    limit = max(job.left - MARGIN, 1.0)
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, cwd=processes.ROOT)
    return done.stdout + done.stderr


def table(lines: list[dict[str, Any]]) -> list[str]:
    """The facts in a list, and limits in GB and TFLOP a second."""
    found = {line["what"]: line for line in lines}
    devices, limits = found.get("devices", {}), found.get("limits", {})
    rows = [f"- {', '.join(devices.get('devices', []))}; NCCL {devices.get('nccl', '-')}"]
    rows += [f"- multicast: {devices.get('multicast', '-')}; peers: {devices.get('peers', '-')}"]
    if "memory" in limits:
        speeds = f"{limits['to_device'] / 1e9:.1f} GB/s from pinned memory, {limits['memory'] / 1e9:.0f} GB/s within"
        rows.append(f"- {speeds}, {limits['operations'] / 1e12:.1f} TFLOP/s in bf16")
    shared = found.get("ranks that share a device", {})
    if shared:
        rows.append(f"- ranks that share a device: {shared.get('backend', '-')} {shared.get('why', '')}")
    return rows


def reckon(gpu: Gpu) -> list[tuple[str, float]]:
    """Mostly processes that start."""
    return [("a probe", gpu.start), ("env", gpu.start / 2)]
