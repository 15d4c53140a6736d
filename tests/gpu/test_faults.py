"""A rank that fails on its GPU: in Python, in a kernel, by an illegal access, without memory. All ranks stop."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu.decoding import Decoder
from benchmarks.gpu.device import device_of
from tests.support.devices import DEVICE, IS_GPU, load_here
from tests.support.models import PROMPTS
from tests.support.pool import TIMEOUT, Pool, WorkerError
from tests.support.tiers import wide
from tp_transformers import MeshError, RemoteRankError, local_tensor, renew_process_group
from tp_transformers.ranks.mesh import join

LIMIT = min(TIMEOUT, 90.0)
"""Seconds until all ranks have to have raised, the start of their processes included."""
FAR = 1 << 40
"""An index beyond all rows."""
KERNEL = 'extern "C" __global__ void write_far(float* x) { x[1ll << 40] = 1.0f; }'


def share_a_gpu() -> None:
    """Run on every rank: NCCL for all on the first GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    os.environ["LOCAL_RANK"] = "0"
    join(init_device_mesh("cuda", (2,)))


@pytest.mark.skipif(not IS_GPU, reason="NCCL needs a GPU")
def test_two_ranks_of_one_gpu_are_refused(pool) -> None:
    assert "got the same GPU as rank 0" in str(pool.error(2, share_a_gpu))


def in_python(output: torch.Tensor) -> None:
    raise ValueError("on this rank")


def in_a_kernel(output: torch.Tensor) -> torch.Tensor:
    """An assertion of the kernel on a GPU, an IndexError on a CPU."""
    return output.flatten()[torch.tensor([FAR], device=output.device)]


def by_an_illegal_access(output: torch.Tensor) -> torch.Tensor:
    """A write to an address without memory; on a CPU, where it would end the process, the error of an index."""
    if not IS_GPU:
        return in_a_kernel(output)
    torch.cuda._compile_kernel(KERNEL, "write_far")((1, 1, 1), (1, 1, 1), (output,))  # type: ignore[attr-defined]
    return output


def without_memory(output: torch.Tensor) -> torch.Tensor:
    return torch.empty(1 << 50, device=DEVICE)


FAULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    function.__name__: function for function in (in_a_kernel, by_an_illegal_access, without_memory, in_python)
}


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """New processes: after an error of a kernel, a process cannot use its GPU any more."""
    pool = Pool(spawn=IS_GPU)
    yield pool
    pool.close()


def go_on(folder: str) -> dict[str, Any]:
    """Run on every rank: rank 1 fails in a forward while others train on; what a new process group finds."""
    model, prompts = load_here(folder), PROMPTS.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        model(prompts, labels=prompts).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    decoder = Decoder(model, device_of(DEVICE), batch=2, prompt=5, room=32)
    step = decoder.compiled() if IS_GPU else decoder.eager()
    tokens, before = decoder.tokens(step, 6), [local_tensor(param).clone() for param in model.parameters()]
    hook = model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: in_python(output) if model.tp_group.rank == 1 else None
    )
    with pytest.raises((ValueError, RemoteRankError)):
        deque(iter(train, 0), 0)
    hook.remove()
    try:
        renew_process_group(model)
    except MeshError as refused:
        return {"refused": str(refused)}
    same = all(torch.equal(local_tensor(param), old) for param, old in zip(model.parameters(), before, strict=True))
    return {"refused": "", "is_unchanged": same, "tokens": torch.equal(decoder.tokens(step, 6), tokens)}


def test_ranks_go_on_with_unchanged_parameters_or_refuse(own_pool, cases) -> None:
    """By NCCL, what the host has enqueued behind an aborted collective runs, and graphs hold its communicator."""
    found = own_pool.run(2, go_on, cases(9, 3).folder, timeout=LIMIT)
    print(found)
    assert found[0] == found[1]
    assert found[0]["refused"] or found[0] == {"refused": "", "is_unchanged": True, "tokens": True}


def fail(folder: str, name: str) -> float:
    """Run on every rank: rank 1 fails in a forward. Returns seconds if none raises."""
    model = load_here(folder)
    model(PROMPTS.to(DEVICE))
    began = time.monotonic()
    if model.tp_group.rank == 1:
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: FAULTS[name](output))
    for _ in range(3):
        model(PROMPTS.to(DEVICE)).logits.sum().item()  # an error of a kernel comes with the next transfer
    return time.monotonic() - began


@pytest.mark.parametrize("name", wide(FAULTS, 1))
def test_all_ranks_stop(own_pool, cases, name) -> None:
    with pytest.raises(WorkerError) as failed:
        own_pool.run(2, fail, cases(9, 3).folder, name, timeout=LIMIT)
    print(failed.value.errors)
    assert failed.value.errors.keys() == {0, 1}, "both have raised, and none is waiting"
    assert "rank 1" in failed.value.errors[0], "the other rank's error names the one that failed"
