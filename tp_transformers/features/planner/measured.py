"""Figures of a device, measured by products in the dtype of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import cycle
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from ...ranks.limits import visible_cores
from .devices import CPU, Device

SECONDS = 0.15
"""Time of each of the two measurements of `seconds_of_products`."""
WIDTH, TOKENS = 4096, 64
"""Side of the matrix that is multiplied, and the number of tokens of the larger product, on a CPU."""
WIDTH_OF_GPU, TOKENS_OF_GPU = 8192, 2048
"""The same elsewhere: enough tokens to be bound by arithmetic."""
UNCACHED = 256 << 20
"""Bytes of the matrices that are multiplied in turn: no cache holds all."""
AT_ONCE = 10
"""Products between two synchronizations."""
LATENCY, SHARED_CORE = 15e-6, 250e-6
"""Seconds of a small all-reduce through shared memory, and where ranks share cores: collectives-cpu.md."""
COPIES = 2
"""Bytes that a rank reads or writes for a byte that an all-reduce sends: collectives-cpu.md."""
LAYERS = 8
"""Layers of the tiny Llama whose forward shows the time of a layer beside its products."""


def seconds_of_products(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of a product of one token, and of many tokens, with a matrix that is in memory of this device alone.

    Other ranks on the same processor should measure at the same time, as they compute at the same time.
    """
    width, tokens = (WIDTH, TOKENS) if device.type == "cpu" else (WIDTH_OF_GPU, TOKENS_OF_GPU)
    held = range(0, UNCACHED, width**2 * dtype.itemsize)  # the first byte of each matrix
    weights = cycle([torch.ones((width, width), dtype=dtype, device=device) for _ in held])
    one, many = (torch.ones((count, width), dtype=dtype, device=device) for count in (1, tokens))
    return _seconds(lambda: linear(one, next(weights)), device), _seconds(lambda: linear(many, next(weights)), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Mean seconds of a call, over SECONDS after the first."""
    is_cpu = device.type == "cpu"
    wait: Any = (lambda: None) if is_cpu else torch.get_device_module(device.type).synchronize
    repeated = 1 if is_cpu else AT_ONCE
    count, began, end = 0, 0.0, 0.0
    while count < 2 or end - began < SECONDS:
        for _ in range(repeated):
            call()
        wait()
        end = perf_counter()
        count, began = count + 1, began or end  # the first calls are not counted
    return (end - began) / (count - 1) / repeated


def this_machine(size: int, dtype: torch.dtype) -> list[Device]:
    """A device for each of `size` ranks that share the cores of this machine."""
    cores = visible_cores()
    at_once = min(size, cores)
    part, (bandwidth, flops) = at_once / size, _rates(at_once, dtype)
    latency = LATENCY if size <= cores else SHARED_CORE
    return [Device(CPU, 0, bandwidth * part, flops * part, bandwidth * part / COPIES, latency, _gap(dtype))] * size


@cache
def _rates(at_once: int, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes and FLOPs a second of each of several threads that compute at once."""
    meet, threads = threading.Barrier(at_once), torch.get_num_threads()

    def measure(_: int) -> tuple[float, float]:
        torch.set_num_threads(max(1, visible_cores() // at_once))
        meet.wait()
        return seconds_of_products(torch.device("cpu"), dtype)

    try:
        with ThreadPoolExecutor(at_once) as pool:
            one, many = map(max, zip(*pool.map(measure, range(at_once)), strict=True))
    finally:
        torch.set_num_threads(threads)
    return WIDTH**2 * dtype.itemsize / one, 2 * TOKENS * WIDTH**2 / many


@cache
@torch.no_grad()
def _gap(dtype: torch.dtype) -> float:
    """Seconds of a layer beside its products, in an eager forward of one token."""
    widths = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**widths, num_hidden_layers=LAYERS)).to(dtype).eval()
    ids = torch.ones(1, 1, dtype=torch.long)
    return _seconds(lambda: model(ids, use_cache=True), ids.device) / LAYERS
