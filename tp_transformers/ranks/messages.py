"""Messages that the ranks of a process group gather through its backend."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_backend_config

LETTER = 504
"""Bytes of a message that ranks gather in one collective; longer ones take a second one."""


def exchange(message: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """The message of every rank of `group`.

    `dist.all_gather_object` first gathers the lengths; here they come with the first LETTER bytes, which hold most
    messages.
    """
    on = torch.device("cpu") if "cpu:" in get_backend_config(group) else device

    def gather(part: bytes, nbytes: int) -> list[bytes]:
        own = torch.frombuffer(bytearray(part.ljust(nbytes, b"\0")), dtype=torch.uint8).to(on)
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own, group=group)
        return [each.cpu().numpy().tobytes() for each in parts]

    letters = gather(len(message).to_bytes(8, "little") + message[:LETTER], 8 + LETTER)
    lengths = [int.from_bytes(letter[:8], "little") for letter in letters]
    longer = max(lengths) - LETTER
    rests = gather(message[LETTER:], longer) if longer > 0 else [b""] * len(letters)
    return [(letter[8:] + rest)[:n] for letter, rest, n in zip(letters, rests, lengths, strict=True)]
