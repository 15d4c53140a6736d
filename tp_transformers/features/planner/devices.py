"""Devices by their names or figures, as `plan --device` says them; imports nothing that takes long."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ...errors import UsageError, nearest

READS, PRODUCTS = 0.85, 0.7
"""Fractions of a data sheet's bandwidths and FLOPs that are counted on; the first is fitted, the second assumed."""
GAP = 70e-6
"""Seconds between a layer's kernels on a GPU without waits for the host; fitted as READS, to gpt-fast's speeds."""
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
LEAST = 1000
"""Minimum bytes or FLOPs; for fewer, the unit is probably missing."""


@dataclass(frozen=True)
class Device:
    """What one rank computes on: figures that a model reaches, not those of a data sheet."""

    name: str
    memory: int
    """Bytes; 0 if unknown."""
    bandwidth: float
    """Bytes of a matrix a second in a product with one token."""
    flops: float
    """FLOPs a second in a product with many tokens."""
    link: float
    """Bytes a second that a rank sends in an all-reduce."""
    latency: float
    """Seconds of an all-reduce of a few bytes."""
    gap: float = GAP
    """Seconds of a layer beside its reads, products and all-reduces."""
    packed: tuple[float, float] | None = None
    """The bandwidth and FLOPs of packed weights; None: those of others."""


NVLINK, PCIE = 10e-6, 25e-6
"""Seconds of a small all-reduce of NCCL: https://github.com/NVIDIA/nccl-tests/issues/331; over PCIe, assumed."""
GPUS = {
    # GB, GB/s of the memory, dense TFLOPs with sums in fp32: bf16, fp32 (no TF32), GB/s to other GPUs, latency.
    "B200": (180, 8000, 2250, 75, 900, NVLINK),  # resources.nvidia.com/en-us-blackwell-architecture
    "H200": (141, 4800, 989, 67, 450, NVLINK),  # nvidia.com/en-us/data-center/h200
    "H100": (80, 3350, 989, 67, 450, NVLINK),  # nvidia.com/en-us/data-center/h100, SXM
    "A100": (80, 2039, 312, 19.5, 300, NVLINK),  # nvidia.com/en-us/data-center/a100, SXM
    "L40S": (48, 864, 362, 91.6, 32, PCIE),  # nvidia.com/en-us/data-center/l40s
    "RTX 4090": (24, 1008, 165, 82.6, 32, PCIE),  # the whitepaper of Ada, as all of 40
    "RTX 4080": (16, 717, 97.5, 48.7, 32, PCIE),
    "RTX 4070 Ti": (12, 504, 80.2, 40.1, 32, PCIE),
    "RTX 4060": (8, 272, 30.2, 15.1, 16, PCIE),
}
"""Figures that makers state, one direction of links."""
CPU = "cpu"
"""The name of this machine, which is measured."""
HELP = f"""say how fast: {CPU} (this machine, measured), {", ".join(GPUS)}, or figures of a data sheet: memory, bytes a
second, dense FLOPs, bytes a second to others, microseconds of a small all-reduce, as 24GB:1008GB:165T:32GB:25; one
for all ranks, or one for each"""


def parse_devices(text: str | None, *, is_fp32: bool) -> list[Device]:
    """The devices that `--device` says: none, one for all ranks, or one for each; this machine has no figures yet.

    Raises UsageError for unknown names and bad figures.
    """
    devices = [_device(part.strip(), is_fp32) for part in text.split(",")] if text is not None else []
    if len(devices) > 1 and any(device.name == CPU for device in devices):
        fix = f"Give {CPU} alone: its figures are measured."
        raise UsageError("--device", got=f"{CPU} with others", expected="GPUs, or figures of devices", fix=fix)
    return devices


def _device(text: str, is_fp32: bool) -> Device:
    if ":" in text:
        figures = text.split(":")
        if len(figures) != 5 or not re.fullmatch(r"\d+(\.\d+)?", figures[4]):
            expected = "memory, bandwidth, FLOPs, link and microseconds of an all-reduce"
            raise UsageError("--device", got=repr(text), expected=expected, fix="Say it as 24GB:1008GB:165T:32GB:25.")
        memory, bandwidth, products, link = (parse_count(figure, "--device") for figure in figures[:4])
        return Device(text, memory, READS * bandwidth, PRODUCTS * products, READS * link, float(figures[4]) / 1e6)
    known = {_plain(name): name for name in (*GPUS, CPU)}
    name = known.get(_plain(text))
    if name is None:
        fix = "Give one of them, or figures: 24GB:1008GB:165T:32GB:25."
        raise UsageError("--device", got=repr(text) + nearest(text, GPUS), expected=", ".join(known.values()), fix=fix)
    if name == CPU:
        return Device(CPU, 0, 1.0, 1.0, 1.0, 0.0)
    gigabytes, bandwidth, bf16, fp32, link, latency = GPUS[name]
    flops = (fp32 if is_fp32 else bf16) * 1e12
    return Device(name, gigabytes * 10**9, READS * bandwidth * 1e9, PRODUCTS * flops, READS * link * 1e9, latency)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]|geforce|nvidia", "", name.lower())


def parse_count(text: str, argument: str) -> int:
    """A number with its unit: 24GB (10^9 bytes), 80GiB (2^30), 165T. Raises UsageError if `text` is not one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    known = match is not None and match[2] in UNITS
    count = min(int(Fraction(match[1]) * UNITS[match[2]]), sys.maxsize) if match is not None and known else 0
    if count < LEAST:
        fix = "Say it as 24GB (10^9 bytes) or 24GiB (2^30), of three ranks as 24GB,24GB,24GB."
        raise UsageError(argument, got=repr(text), expected="a number of bytes with its unit", fix=fix)
    return count


def are_alike(devices: Sequence[Device]) -> bool:
    return len(set(devices)) == 1
