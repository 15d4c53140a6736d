"""Figures of a device, measured by products in the dtype of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.utils import skip_init
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from ...ranks.limits import visible_cores
from ..cpu_decode.products import choose_kernels
from ..packed.integers import int4_product, pack_int4
from .devices import CPU, Device

SECONDS = 0.15
"""Time of each of the two measurements of `seconds_of_products`."""
WIDTH, TOKENS = 4096, 64
"""Side of the matrix that is multiplied, and the number of tokens of the larger product, on a CPU."""
GROUP = 128
"""Columns of a matrix of 4 bits that share a scale."""
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
"""Layers of the tiny model whose forward shows the time of a layer beside its products."""


Products = tuple[Iterator[Callable[[torch.Tensor], object]], torch.Tensor]
"""Products with matrices in turn, and the inputs of many tokens."""


def seconds_of_products(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of a product of one token, and of many tokens, with a matrix that is in memory of this device alone.

    Other ranks on the same processor should measure at the same time, as they compute at the same time.
    """
    products = _linears(device, dtype)
    return _seconds_of(1, products), _seconds_of(len(products[1]), products)


def _linears(device: torch.device, dtype: torch.dtype) -> Products:
    width, tokens = (WIDTH, TOKENS) if device.type == "cpu" else (WIDTH_OF_GPU, TOKENS_OF_GPU)
    held = range(0, UNCACHED, width**2 * dtype.itemsize)  # the first byte of each matrix
    linears = nn.ModuleList(skip_init(nn.Linear, width, width, False, device=device, dtype=dtype) for _ in held)
    for param in linears.parameters():
        nn.init.ones_(param)
    choose_kernels(linears)
    return cycle(linears), torch.ones((tokens, width), dtype=dtype, device=device)


def _integers() -> Products:
    """The same as `_linears`, with integers of 4 bits and bfloat16 on a CPU, by torch's operator."""
    integers = pack_int4(torch.ones(WIDTH, WIDTH, dtype=torch.int32), 1)
    held = cycle([integers.clone() for _ in range(0, UNCACHED, integers.nbytes)])
    scales = torch.ones(WIDTH // GROUP, WIDTH, 2, dtype=torch.bfloat16)
    calls = (lambda x, one=one: int4_product(x, one, GROUP, scales) for one in held)
    return calls, torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16)


@torch.no_grad()
def _seconds_of(tokens: int, products: Products) -> float:
    """Seconds of a product of the first `tokens`."""
    calls, inputs = products
    rows = inputs[:tokens]
    return _seconds(lambda: next(calls)(rows), rows.device)


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


def this_machine(size: int, dtype: torch.dtype, *, packed: bool = False, experts: bool = False) -> list[Device]:
    """A device for each of `size` ranks that share the cores of this machine.

    `packed`, `experts`: whether the model has packed weights (whose rates are those of 4 bits), and experts.
    """
    cores = visible_cores()
    at_once = min(size, cores)
    part, (bandwidth, flops) = at_once / size, _rates(at_once, dtype)
    latency, gap = LATENCY if size <= cores else SHARED_CORE, _gap(dtype, experts)
    device = Device(CPU, 0, bandwidth * part, flops * part, bandwidth * part / COPIES, latency, gap)
    if packed and dtype == torch.bfloat16 and int4_product is not None:
        reads, products = _rates(at_once, None)
        device = replace(device, packed=(reads * part, products * part))
    return [device] * size


@cache
def _rates(at_once: int, dtype: torch.dtype | None) -> tuple[float, float]:
    """Bytes and FLOPs a second of each of several threads that compute at once; None for integers of 4 bits."""
    make = _integers if dtype is None else partial(_linears, torch.device("cpu"), dtype)
    threads, part = torch.get_num_threads(), max(1, visible_cores() // at_once)
    try:
        with ThreadPoolExecutor(at_once, initializer=torch.set_num_threads, initargs=(part,)) as pool:
            made = list(pool.map(lambda _: make(), range(at_once)))
            # All measure one token, then all many: products of one token turn oneDNN off in all threads.
            one, many = (max(pool.map(partial(_seconds_of, tokens), made)) for tokens in (1, TOKENS))
    finally:
        torch.set_num_threads(threads)
    itemsize = 0.5 + 4 / GROUP if dtype is None else dtype.itemsize
    return WIDTH**2 * itemsize / one, 2 * TOKENS * WIDTH**2 / many


@cache
@torch.no_grad()
def _gap(dtype: torch.dtype, experts: bool) -> float:
    """Seconds of a layer beside its products, in an eager forward of one token."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    widths = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS}
    config = (MixtralConfig if experts else LlamaConfig)(**widths, **heads)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    ids = torch.ones(1, 1, dtype=torch.long)
    return _seconds(lambda: model(ids, use_cache=True), ids.device) / LAYERS
