"""One rank of one load: `python -m benchmarks.worker JOB`, JOB as JSON. Checks, times or saves the load."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor  # both sides need it
import transformers
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from .checkpoints import files
from .memory import Watch, at_rest, local, shard_bytes, touch

TOKENS = 8
"""Input length of the first forward."""


@dataclasses.dataclass(frozen=True)
class Job:
    """The job of one rank."""

    result: str
    """File for the result."""
    action: str
    """"check" against `reference`, "time", "save" to `target` as shards; "copy" times pinned memory to the
    device, "read" safetensors' own reader."""
    side: str
    """"native", transformers' own tensor parallelism, or "ours"."""
    checkpoint: str
    """Argument of from_pretrained: a folder, or a name on a Hub."""
    rank: int
    size: int
    store: str
    """File for the rendezvous of the ranks; "" with fake collectives."""
    device: str
    reference: str = ""
    target: str = ""
    stream: bool = False
    """True if our load streams from the Hub."""
    copy: bool = False
    """True if our load copies all parameters, so that no shard stays mapped."""
    packed: bool = False
    """True if our load keeps quantised weights packed."""


def main() -> None:
    """Run the job in argv, and write its result."""
    job = Job(**json.loads(sys.argv[1]))
    logging.disable_progress_bar()
    mesh = _start_group(job)
    try:
        arguments = _arguments(job, mesh)
        result = {"check": _check, "time": _time, "save": _save, "copy": _copy, "read": _read}[job.action](
            job, arguments
        )
    finally:
        gc.collect()  # models are reference cycles that keep process groups, and so their threads, alive at exit
        dist.destroy_process_group()
    result["device"] = torch.cuda.get_device_name() if job.device == "cuda" else ""
    Path(job.result).write_text(json.dumps(result), encoding="utf-8")


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


def _copy(job: Job, arguments: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second from pinned memory to the device, best of ten."""
    source = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=job.device)
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return {"pinned": source.nbytes / best}


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
        held = [tensor for tensor in held if not tensor.is_meta] + (_packed_tensors(model) if job.packed else [])
        touch(held)
        _synchronize(job)
        loaded = time.perf_counter()
    shard, anonymous = shard_bytes(held)
    rest = at_rest()
    result = {"shard": shard, "anonymous_shard": anonymous, "load": loaded - start, **watch.result(), "rest": rest}
    if job.device == "cuda":
        result["device_peak"] = torch.cuda.max_memory_allocated() - device_start
    # 3. Compute; the clock continues from the end of the load.
    start = time.perf_counter()
    with torch.no_grad():
        model(tokens)
    _synchronize(job)
    result["forward"] = time.perf_counter() - start
    result["process"] = _age()
    # 4. The loader's own counters.
    if job.side == "ours":
        result["report"] = dataclasses.asdict(model.tp_report) | {"text": str(model.tp_report)}
    return result


def _packed_tensors(model: Any) -> list[torch.Tensor]:
    """The tensors of packed weights."""
    from tp_transformers.features.packed.weight import PackedWeight, packed_weights

    weights = [weight for weight in packed_weights(model).values() if isinstance(weight, PackedWeight)]
    return [tensor for weight in weights for block in weight.blocks for tensor in block.decoded.stored.values()]


def _arguments(job: Job, mesh: Any) -> dict[str, Any]:
    """Further arguments of from_pretrained."""
    if job.side == "ours":
        import tp_transformers  # only on this side; counts towards its time from the process start

        tp_transformers.enable()
        return {
            "tp_plan": "auto",
            "dtype": "auto",
            **({"device_mesh": mesh} if mesh is not None else {}),
            **({"tp_stream": True} if job.stream else {}),
            **({"tp_map": False} if job.copy else {}),
            **({"tp_dequantize": False} if job.packed else {}),
        }
    if {field.name for field in dataclasses.fields(DistributedConfig)} >= {"tp_size", "tp_plan"}:
        return {"distributed_config": DistributedConfig(tp_size=job.size, tp_plan="auto"), "dtype": "auto"}
    raise SystemExit(f"transformers {transformers.__version__} does not keep its shards as DTensors: nothing to check")


def _start_group(job: Job) -> Any:
    """Start the process group; with fake collectives, return the mesh with the device."""
    if job.store:
        store = dist.FileStore(job.store, job.size)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size)
        return None
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=job.rank, world_size=job.size)
    return init_device_mesh(job.device, (job.size,), mesh_dim_names=("tp",))


def _age() -> float:
    """Seconds since the start of this process, including imports and the process group."""
    started = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])  # in ticks
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def _synchronize(job: Job) -> None:
    if job.device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
