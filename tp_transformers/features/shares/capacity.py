"""Capacity of a device: bytes that are free for this process, and the time of products."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import linear

from ...ranks.limits import available_memory

SECONDS = 0.15
"""Time of each of the two measurements of `seconds_of_products`."""
WIDTH, TOKENS = 4096, 64
"""Side of the matrix that is multiplied, and the number of tokens of the larger product, on a CPU."""
WIDTH_OF_GPU, TOKENS_OF_GPU = 8192, 2048
"""The same elsewhere: a matrix that no cache holds, and enough tokens to be bound by arithmetic."""
AT_ONCE = 10
"""Products between two synchronizations."""


def free_memory(device: torch.device, sharers: int = 1) -> int:
    """Bytes that this process can still allocate on `device`; `sharers`: processes that share a CPU's memory.

    On a CPU, the least of: the memory that the system calls available, and that of the process's control groups, each
    divided by `sharers`; the limits of the process's address space and data segment.
    """
    if device.type != "cpu":
        module: Any = torch.get_device_module(device.type)
        return int(module.mem_get_info(device)[0])
    return min([available_memory() // max(1, sharers), *_left_of_limits()])


def seconds_of_products(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of a product of one token, which reads the matrix from memory, and of many tokens, on this device.

    Other ranks on the same processor should measure at the same time, as they compute at the same time.
    """
    width, tokens = (WIDTH, TOKENS) if device.type == "cpu" else (WIDTH_OF_GPU, TOKENS_OF_GPU)
    weight = torch.ones((width, width), dtype=dtype, device=device)
    one, many = (_seconds(torch.ones((count, width), dtype=dtype, device=device), weight) for count in (1, tokens))
    return one, many


def _seconds(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Mean seconds of a product, over SECONDS after the first."""
    is_cpu = x.device.type == "cpu"
    wait = (lambda: None) if is_cpu else torch.get_device_module(x.device.type).synchronize
    repeated = 1 if is_cpu else AT_ONCE
    count, began, end = 0, 0.0, 0.0
    while count < 2 or end - began < SECONDS:
        for _ in range(repeated):
            linear(x, weight)
        wait()
        end = perf_counter()
        count, began = count + 1, began or end  # the first products are not counted
    return (end - began) / (count - 1) / repeated


def _left_of_limits() -> list[int]:
    """Bytes left of the limits on this process's address space and data segment."""
    try:
        import resource  # not on Windows

        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        used = {name: 1024 * int(fields[field].split()[0]) for name, field in (("AS", "VmSize"), ("DATA", "VmData"))}
    except (ImportError, OSError, KeyError):
        return []
    limits = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in used}
    return [max(0, limit - used[name]) for name, limit in limits.items() if limit != resource.RLIM_INFINITY]
