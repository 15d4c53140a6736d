"""One rank of one load: checks, times or saves it."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor  # both sides need it
import transformers
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from .checkpoints import files
from .memory import Watch, local, shard_bytes, touch
from .ranks import joined

TOKENS = 8
"""Input length of the first forward."""


@dataclasses.dataclass(frozen=True)
class Job:
    """The job of one rank."""

    action: str
    """"check" against `reference`, "time" a load, "start" as a script does, up to the first forward, "save" to `target`
    as shards; "read" times safetensors' own reader."""
    side: str
    """"native", transformers' own tensor parallelism, or "ours"."""
    checkpoint: str
    """Argument of from_pretrained: a folder, or a name on a Hub."""
    rank: int
    size: int
    store: str
    """File for the rendezvous of the ranks; "" with fake collectives."""
    device: str
    reference: str
    target: str
    stream: bool
    """True if our load streams from the Hub."""


def on_rank(**job: Any) -> dict[str, Any]:
    """Do the `Job`; returns its numbers, and the name of the GPU as "device"."""
    given = Job(**job)
    action = {"check": _check, "time": _time, "start": _start, "save": _save, "read": _read}[given.action]
    with joined(given.store, given.rank, given.size, given.device) as mesh:
        result = action(given, _arguments(given, mesh))
    return {**result, "device": torch.cuda.get_device_name() if given.device == "cuda" else ""}


def _check(job: Job, arguments: dict[str, Any]) -> dict[str, Any]:
    from .check import check

    model = AutoModelForCausalLM.from_pretrained(job.checkpoint, **arguments)
    count = check(model, Path(job.reference), rank=job.rank, size=job.size, collectives=bool(job.store))
    return {"tensors": count}


def _save(job: Job, arguments: dict[str, Any]) -> dict[str, Any]:
    import tp_transformers

    model = AutoModelForCausalLM.from_pretrained(job.checkpoint, **arguments)
    tp_transformers.save_sharded(model, job.target)
    return {}


def _read(job: Job, arguments: dict[str, Any]) -> dict[str, Any]:
    """Seconds and bytes of all tensors to the device, each freed before the next."""
    total, start = 0, time.perf_counter()
    for file in files(Path(job.checkpoint)):
        with safe_open(file, framework="pt", device=job.device) as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                total += opened.get_tensor(name).nbytes
    _synchronize(job)
    return {"load": time.perf_counter() - start, "bytes": total}


def _time(job: Job, arguments: dict[str, Any]) -> dict[str, Any]:
    """Seconds, bytes and memory of a load and of the first forward after it."""
    # 1. Import the modules that the load needs, so that they are not timed; also the model's class.
    if job.side == "ours":
        import tp_transformers.loading.from_pretrained  # noqa: F401
    AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(job.reference))]
    tokens = torch.arange(TOKENS, device=job.device)[None]
    if job.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        device_start = torch.cuda.memory_allocated()
    # 2. Load: from a barrier until the last page of the last parameter was read.
    with Watch() as watch:
        dist.barrier()
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(job.checkpoint, **arguments)
        held = [local(tensor) for tensor in (*model.parameters(), *model.buffers())]
        touch(held)
        _synchronize(job)
        loaded = time.perf_counter()
    shard, anonymous = shard_bytes(held)
    result = {"shard": shard, "anonymous_shard": anonymous, "load": loaded - start, **watch.result()}
    if job.device == "cuda":
        result["device_peak"] = torch.cuda.max_memory_allocated() - device_start
    # 3. Compute; the clock continues from the end of the load.
    start = time.perf_counter()
    with torch.no_grad():
        model(tokens)
    _synchronize(job)
    result["forward"] = time.perf_counter() - start
    # 4. The loader's own counters.
    if job.side == "ours":
        result["report"] = dataclasses.asdict(model.tp_report) | {"text": str(model.tp_report)}
    return result


def _start(job: Job, arguments: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the start of the process to the end of the first forward; models are imported by the load."""
    model = AutoModelForCausalLM.from_pretrained(job.checkpoint, **arguments)
    with torch.no_grad():
        model(torch.arange(TOKENS, device=job.device)[None])
    _synchronize(job)
    return {"process": _age()}


def _arguments(job: Job, mesh: DeviceMesh) -> dict[str, Any]:
    """Further arguments of from_pretrained."""
    if job.side == "ours":
        import tp_transformers  # only on this side; counts towards its time from the process start

        tp_transformers.enable()
        return {
            "tp_plan": "auto",
            "dtype": "auto",
            **({} if job.store else {"device_mesh": mesh}),
            **({"tp_stream": True} if job.stream else {}),
        }
    if {field.name for field in dataclasses.fields(DistributedConfig)} >= {"tp_size", "tp_plan"}:
        return {"distributed_config": DistributedConfig(tp_size=job.size, tp_plan="auto"), "dtype": "auto"}
    raise SystemExit(f"transformers {transformers.__version__} does not keep its shards as DTensors: nothing to check")


def _age() -> float:
    """Seconds since the start of this process, including imports and the process group."""
    started = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])  # in ticks
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def _synchronize(job: Job) -> None:
    if job.device == "cuda":
        torch.cuda.synchronize()
