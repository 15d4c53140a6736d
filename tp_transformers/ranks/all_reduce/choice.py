"""Choose the way of one all-reduce on GPUs by its size, its dtype and the machine; a pure function.

Sizes at which one way overtakes another were measured by other projects on their machines, and none by this one:

| sizes | source |
| --- | --- |
| ONE_SHOT_MOST | torchtitan's distributed/comms.py (08342a6), 8 H100; Inductor's `_collective` |
| one-shot at any size on 2 ranks | vLLM's csrc/custom_all_reduce.cuh: one stage, which moves no more bytes there |
| MULTICAST_MOST, MULTIMEM_RANKS | vLLM's all_reduce_utils.py (00d618a) and symm_mem.py (00859a5): bf16, against NCCL |
| NVLINK_MOST on capability 9 and later | two-shot without multicast: torchtitan, as above |
| NVLINK_MOST before | kTwoShotThreshBytes of torch's intra_node_comm.cu, from A100 |
| PCIE_MOST, at most 2 ranks | vLLM's custom_all_reduce.py (00d618a): `max_size`, and its rule for GPUs without NVLink |
| RANKS | the counts in these tables; others were not measured |
| SYMMETRIC_RANKS | `min_world_size` of NCCL's symmetric kernels in vLLM's all_reduce_utils.py, as above |

Conditions: torch's kernels dispatch on float and bfloat16 (CUDASymmetricMemoryOps.cu), and add bfloat16 pairs from
capability 8.0 on. NCCL has symmetric kernels since 2.27 for floats of at most 32 bits on one NVLink domain (its notes
on 2.27.3). Those of 2.28 up to 2.30.6 may read an input before it is written (sglang pull request 37768).

Order of the sum: `one_shot` and `two_shot` add in rank order (`load_and_reduce` in torch's CUDASymmetricMemory-inl.h),
each element on one rank or identically on all: bitwise equal on all ranks, repeatable, and independent of the size.
16-bit floats are rounded after each addition. `multimem`, and NCCL's kernels with multicast, add in the switch: equal
on all ranks, but not between two calls (NVIDIA/nccl issue 1497). NCCL's other algorithms repeat their sums, but the
algorithm depends on the size; NCCL_ALGO fixes it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch

KIB, MIB = 1 << 10, 1 << 20

ONE_SHOT_MOST = 128 * KIB
MULTICAST_MOST = {
    (9, 0): {2: 64 * MIB, 4: 32 * MIB, 6: 64 * MIB, 8: 64 * MIB},
    (10, 0): {2: 8 * MIB, 4: 32 * MIB, 6: 128 * MIB, 8: 128 * MIB},
    (10, 3): {2: 4 * MIB, 4: 32 * MIB, 6: 32 * MIB, 8: 64 * MIB},
}
"""{compute capability: {ranks: most bytes of torch's kernels}} on GPUs with multicast."""
MULTIMEM_RANKS = {(9, 0): (4, 6, 8), (10, 0): (6, 8), (10, 3): (6, 8)}
NVLINK_MOST = ((9, 0), 16 * MIB), ((8, 0), 10 * MIB)
"""Most bytes without multicast, from a compute capability on."""
PCIE_MOST = 8 * MIB
RANKS = (2, 4, 6, 8)
SYMMETRIC_RANKS = 4

SYMMETRIC_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of torch's kernels in symmetric memory."""


class Way(Enum):
    """A way to all-reduce."""

    NCCL = "nccl"
    """The backend."""
    NCCL_SYMMETRIC = "nccl_symmetric"
    """NCCL's kernels on a buffer at the same offset of a registered window on all ranks."""
    ONE_SHOT = "one_shot"
    """Each rank reads the inputs of all ranks."""
    TWO_SHOT = "two_shot"
    """Each rank sums one chunk, and writes it to all ranks."""
    MULTIMEM = "multimem"
    """As TWO_SHOT, but the NVLink switch adds and distributes."""


IN_RANK_ORDER = (Way.ONE_SHOT, Way.TWO_SHOT)
"""The ways with sums in rank order."""


@dataclass(frozen=True)
class Situation:
    """The ranks and their machine: equal on all ranks."""

    ranks: int
    one_machine: bool = True
    peers: Literal["nvlink", "pcie", "none"] = "none"
    """The slowest path by which a GPU of these ranks accesses the memory of another; "none" if one cannot."""
    multicast: bool = False
    """True if the NVLink switch adds and distributes."""
    capability: tuple[int, int] = (0, 0)
    """Lowest compute capability of the GPUs."""
    torch: tuple[int, ...] = (0, 0)
    nccl: tuple[int, ...] = (0, 0, 0)
    deterministic: bool = False
    """True if sums have to be bitwise equal on all ranks and in all runs, at any size."""


def choose(
    nbytes: int, dtype: torch.dtype, situation: Situation, working: Collection[Way], asked: Way | None = None
) -> Way:
    """The way of an all-reduce of `nbytes` bytes; NCCL if no other is possible, also if NCCL is not deterministic.

    `working`: the ways that passed their check. `asked`: use this way at any size where it is possible.
    """
    ways = (asked,) if asked is not None else _by_size(nbytes, situation)
    possible = (way for way in ways if way in working and not obstacle(way, dtype, situation))
    return next(possible, Way.NCCL) if nbytes else Way.NCCL


def obstacle(way: Way, dtype: torch.dtype, situation: Situation) -> str:
    """The reason why `way` cannot be used, at any size; "" if it can."""
    if way is Way.NCCL:
        return ""
    if not situation.one_machine:
        return "the ranks are on several machines"
    if situation.deterministic and way not in IN_RANK_ORDER:
        return "its sums differ between runs, and torch.use_deterministic_algorithms is set"
    if way is Way.NCCL_SYMMETRIC:
        return _obstacle_of_nccl(dtype, situation)
    if dtype not in SYMMETRIC_DTYPES:
        return f"torch has no kernel for {dtype}"
    if situation.peers == "none":
        return "a GPU cannot access the memory of another, or does not see it"
    if situation.capability < (8, 0):
        return "a GPU has a compute capability below 8.0"
    if way is Way.MULTIMEM and not (situation.multicast and situation.capability >= (9, 0)):
        return "the GPUs have no multicast"
    return ""


def candidates(situation: Situation) -> set[Way]:
    """The ways that `choose` considers, at any size."""
    return {way for power in range(40) for way in _by_size(1 << power, situation)}


def most_bytes(situation: Situation) -> int:
    """Most bytes at which torch's kernels were measured to be faster than NCCL; 0 without such a measurement."""
    if situation.ranks not in RANKS or (situation.peers == "pcie" and situation.ranks > 2):
        return 0
    if situation.peers == "pcie":
        return PCIE_MOST
    if situation.multicast and situation.capability in MULTICAST_MOST:
        return MULTICAST_MOST[situation.capability][situation.ranks]
    return next((most for since, most in NVLINK_MOST if situation.capability >= since), 0)


def _by_size(nbytes: int, situation: Situation) -> tuple[Way, ...]:
    """Ways, the best one first, for one of `nbytes` bytes."""
    is_short = nbytes <= ONE_SHOT_MOST or situation.ranks == 2
    if situation.deterministic:  # NCCL would be faster for long ones, but not equal at all sizes
        return (Way.ONE_SHOT,) if is_short else (Way.TWO_SHOT,)
    symmetric = (Way.NCCL_SYMMETRIC,) if situation.ranks >= SYMMETRIC_RANKS else ()
    if nbytes > most_bytes(situation):
        return symmetric
    if is_short:
        return (Way.ONE_SHOT, *symmetric)
    if situation.ranks in MULTIMEM_RANKS.get(situation.capability, ()):
        return (Way.MULTIMEM, Way.TWO_SHOT, *symmetric)
    return (Way.TWO_SHOT, *symmetric)


def _obstacle_of_nccl(dtype: torch.dtype, situation: Situation) -> str:
    if dtype not in (*SYMMETRIC_DTYPES, torch.float16):
        return f"NCCL has no symmetric kernel for {dtype}"
    if situation.peers != "nvlink":
        return "the GPUs are not all connected by NVLink"
    if situation.torch < (2, 9):
        return "torch before 2.9 registers no symmetric windows"
    if situation.nccl < (2, 27) or (2, 28) <= situation.nccl < (2, 30, 7):
        return "it needs NCCL 2.27, or 2.30.7 and later"
    return ""
