"""What the ranks of all measurements do: they join their group, take their turns, and have the same prompts."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.utils import logging

T = TypeVar("T")


@contextmanager
def joined(store: str, rank: int, size: int, device: str = "cpu", backend: str = "nccl") -> Iterator[DeviceMesh]:
    """The mesh of all ranks on the axis `tp`, without warnings and progress bars of what is measured.

    Args:
        store: a new file, by which the ranks meet; "" for torch's fake backend, whose collectives return at once.
        device: "cuda" or "cpu"; the ranks share the GPUs if there are more ranks.
        backend: of the collectives on GPUs.
    """
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if store:
        backends = f"cpu:gloo,cuda:{backend}" if device == "cuda" else "gloo"
        dist.init_process_group(backends, init_method=f"file://{store}", rank=rank, world_size=size)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh(device, (size,), mesh_dim_names=("tp",))
        dist.barrier()
    finally:
        gc.collect()  # models are reference cycles that keep process groups, and so their threads, alive at exit
        dist.destroy_process_group()


def prompts(vocabulary: int, batch: int, length: int) -> Tensor:
    """Random tokens, the same on all ranks: (batch, length)."""
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(batch))


def in_turn(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each side returns in every round; the order alternates, so that drift of the machine favours none."""
    found: dict[str, list[T]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in list(sides) if number % 2 == 0 else reversed(sides):
            found[side].append(sides[side]())
    return found
