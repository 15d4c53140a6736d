"""The device of a measurement: a GPU, or in a rehearsal a CPU with stand-ins for all that only CUDA has."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Step = Callable[[], Any]

WARM = 3
"""Calls before a capture: they allocate, choose kernels and create the communicators."""


def device_of(kind: str) -> Device:
    """The device of type "cuda" or "cpu"."""
    return CudaDevice() if kind == "cuda" else Device()


class Device:
    """Clock, memory and graphs of a CPU. It counts no memory; a graph is the step itself; Dynamo traces alone."""

    def name(self) -> str:
        """The product's name."""
        return "rehearsal on a CPU"

    def synchronize(self) -> None:
        """Wait until the device has computed all that it was given."""

    def allocated(self) -> int:
        """Bytes of tensors on the device."""
        return 0

    def forget_peak(self) -> None:
        """Begin to measure `peak`."""

    def peak(self) -> int:
        """Most bytes of tensors on the device since `forget_peak`."""
        return 0

    def seconds(self, step: Step, count: int) -> float:
        """Seconds of one of `count` consecutive steps, by the device's clock."""
        began = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - began) / count

    def graph(self, step: Step) -> Step:
        """A function that replays the device's work of `step`, after WARM calls of it."""
        for _ in range(WARM):
            step()
        return step

    def compiled(self, model: Any) -> Any:
        """The model through torch.compile, without graph breaks, for shapes that do not change."""
        return torch.compile(model, backend="eager", fullgraph=True, dynamic=False)

    def host_waits(self, step: Step) -> int:
        """Number of places of `step` in which the host waits for the device."""
        with torch.compiler.set_stance("force_eager"), _Reads() as reads:  # Dynamo traces nothing below such a mode
            step()
        return reads.count


class CudaDevice(Device):
    """The current GPU from NVIDIA."""

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def name(self) -> str:
        return torch.cuda.get_device_name()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def forget_peak(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def seconds(self, step: Step, count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    def graph(self, step: Step) -> Step:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": threads of the process group may query events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        return graph.replay

    def compiled(self, model: Any) -> Any:
        return torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def host_waits(self, step: Step) -> int:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(each.message) for each in seen)


class _Reads(TorchDispatchMode):
    """Counts operators that give the host a number, or a length, that a GPU would have to compute first."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        is_mask = func is aten.index.Tensor and any(each is not None and each.dtype == torch.bool for each in args[1])
        self.count += is_mask or func in (aten._local_scalar_dense.default, aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def found(kind: str) -> dict[str, Any]:
    """Use the device: its name, and the number of devices."""
    torch.ones(1, device=kind).add(1).item()
    return {"name": device_of(kind).name(), "count": torch.cuda.device_count() if kind == "cuda" else 1}
