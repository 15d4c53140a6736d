"""A network cable that holds back and loses packets: a program between two TAP devices."""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Constants of linux/if_tun.h and linux/prctl.h.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFORMATION, _OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _TCP_SEGMENTS = 0x01, 0x02 | 0x04
_PR_SET_TIMERSLACK = 29
_FRAME = 1 << 17


class Cable:
    """The device `eth0` of one network namespace, and the device `name` of another, with a program between them.

    Args:
        inside: the namespace that gets `eth0`.
        outside: the namespace that gets `name`.
        delay: seconds by which a packet is held back, in each direction.
        loss: the share of packets that are lost.
    """

    def __init__(self, inside: str, outside: str, name: str, delay: float, loss: float) -> None:
        ends = []
        for namespace, device in ((inside, "eth0"), (outside, name)):
            end, made = _tap()
            ends.append(end)
            move = ["ip", "link", "set", made, "netns", namespace, "name", device]
            subprocess.run(move, check=True)
        command = [sys.executable, "-m", "tests.support.cable", *map(str, ends), str(delay), str(loss)]
        self._program = subprocess.Popen(command, pass_fds=ends, cwd=Path(__file__).parents[2])
        for end in ends:
            os.close(end)

    def close(self) -> None:
        """End the program."""
        self._program.kill()
        self._program.wait()


def _tap() -> tuple[int, str]:
    """A new TAP device, its packets up to 64 KB long as those of a veth pair: its descriptor and its name."""
    descriptor, name = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"tap{uuid.uuid4().hex[:8]}"
    kind = _TAP | _NO_PACKET_INFORMATION | _OFFLOAD_HEADER
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), kind))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CHECKSUMS | _TCP_SEGMENTS)
    return descriptor, name


def _carry(ends: tuple[int, int], delay: float, loss: float) -> None:
    """Carry frames between the `ends` for ever."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)  # else the kernel ends a wait up to 50 us late
    other, chance = {ends[0]: ends[1], ends[1]: ends[0]}, random.Random(0)
    held: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        for ready in select.select(ends, [], [], wait)[0]:
            for frame in _frames(ready):
                if chance.random() >= loss:
                    number += 1
                    heapq.heappush(held, (time.monotonic() + delay, number, other[ready], frame))
        while held and held[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(held)
            with suppress(OSError):  # the device is down, or its queue is full: the packet is lost
                os.write(end, frame)


def _frames(end: int) -> Iterator[bytes]:
    """The frames that wait at an end."""
    with suppress(OSError):
        while True:
            yield os.read(end, _FRAME)


if __name__ == "__main__":
    _carry((int(sys.argv[1]), int(sys.argv[2])), float(sys.argv[3]), float(sys.argv[4]))
