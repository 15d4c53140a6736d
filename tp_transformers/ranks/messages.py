"""All-gather of byte messages through the backend of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_backend_config

FIRST_BYTES = 504
"""Longest message, in bytes, that one collective gathers; longer messages take a second collective."""


def exchange(message: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Gather the message of every rank of `group`.

    `dist.all_gather_object` takes an extra collective for the lengths; here they are sent with the first bytes.
    """
    on = host_or(device, group)

    def gather(data: bytes, nbytes: int) -> list[bytes]:
        own = torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8).to(on)
        buffers = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(buffers, own, group=group)
        return [buffer.cpu().numpy().tobytes() for buffer in buffers]

    heads = gather(len(message).to_bytes(8, "little") + message[:FIRST_BYTES], 8 + FIRST_BYTES)
    lengths = [int.from_bytes(head[:8], "little") for head in heads]
    longer = max(lengths) - FIRST_BYTES
    tails = gather(message[FIRST_BYTES:], longer) if longer > 0 else [b""] * len(heads)
    return [(head[8:] + tail)[:n] for head, tail, n in zip(heads, tails, lengths, strict=True)]


def host_or(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """The CPU if `group` has a backend for CPU tensors, else `device`.

    gloo sends no GPU tensor to a single rank (it reads the address as one of the CPU), and NCCL makes a communicator,
    with buffers on the GPU, for each two ranks.
    """
    return torch.device("cpu") if "cpu:" in get_backend_config(group) else device
