"""Collectives through shared memory, held against those of torch's gloo, and the ranks that may use it."""

import logging
import os
import random
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.logged import logged
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers import MeshError
from tp_transformers.features.shared_memory import joining, memory, segment
from tp_transformers.features.shared_memory.segment import FOLDER, SLOT
from tp_transformers.ranks import direct
from tp_transformers.ranks.direct import BACKEND, MAX, SUM, transport_of
from tp_transformers.ranks.mesh import join

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
LENGTHS = (0, 1, 7, 2048, (SLOT >> 2) - 1, (SLOT >> 2) + 1, (SLOT >> 1) + 3, (3 * SLOT >> 2) + 5)
"""Around the sizes at which tensors of 4 bytes take another way."""

MOST = 1 << 24
"""Elements of a gathered tensor, which every rank holds."""


def values(length: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Numbers of which another order of the ranks has another sum in most dtypes."""
    found = torch.randn(length, generator=torch.Generator().manual_seed(rank * 31 + length)) * 100
    return (found.abs() % 50 if dtype == torch.uint8 else found).to(dtype)


def total(parts: list[Tensor], op: Any = SUM) -> Tensor:
    """The sum in the order of the ranks, of 16-bit floats in float32."""
    if op == MAX:
        return torch.stack(parts).amax(0)
    found = parts[0].float() if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].clone()
    for part in parts[1:]:
        found += part
    return found.to(parts[0].dtype)


@pytest.mark.parametrize("size", wide([3, 2, 4, 8], 1))
@on_ranks()
def test_collectives_are_those_of_the_reference() -> None:
    """Bit by bit, of every dtype and length."""
    group = join()
    rank, size, process_group = group.rank, group.size, group.process_group
    assert transport_of(process_group) is not BACKEND
    wrong = []

    def check(name: str, found: Tensor, expected: Tensor) -> None:
        if not torch.equal(found, expected) or found.shape != expected.shape:
            wrong.append(f"{name} {length} {dtype}")

    for length in LENGTHS:
        for dtype in DTYPES:
            parts = [values(length, dtype, each) for each in range(size)]
            for op in (SUM, MAX) if length else (SUM,):
                x = parts[rank].clone()
                direct.all_reduce(x, process_group, op)
                check(f"all_reduce {op}", x, total(parts, op))
            columns = torch.stack((parts[rank], torch.zeros_like(parts[rank])), 1)
            direct.all_reduce(columns[:, 0], process_group)
            check("all_reduce of a column", columns[:, 0], total(parts))
            check("beside the column", columns[:, 1], torch.zeros_like(columns[:, 1]))
            check("all_gather", direct.all_gather(parts[rank], process_group), torch.cat(parts))
            x = parts[rank].clone()
            direct.broadcast(x, process_group, size - 1)
            check("broadcast", x, parts[-1])
            rows = length // size
            summed = direct.reduce_scatter(parts[rank][: rows * size].clone(), process_group)
            check("reduce_scatter", summed, total(parts)[rank * rows : (rank + 1) * rows])
            counts = [[length * (to + sender) // (3 * size) for to in range(size)] for sender in range(size)]
            sent = values(sum(counts[rank]), dtype, rank)
            received = [counts[sender][rank] for sender in range(size)]
            expected = [values(sum(row), dtype, of).split(row)[rank] for of, row in enumerate(counts)]
            check("all_to_all", direct.all_to_all(sent, counts[rank], received, process_group), torch.cat(expected))
            # Rank 0 has nothing for anybody, and each other one row for each.
            rows = torch.cat([values(3, dtype, rank).expand(size if rank else 0, 3)])
            found = direct.all_to_all(rows, [int(rank > 0)] * size, [0, *[1] * (size - 1)], process_group)
            check("all_to_all of rows", found, torch.stack([values(3, dtype, each) for each in range(1, size)]))
    for length in (0, 1, SLOT - 1, SLOT, SLOT + 1, 5 * SLOT):
        found = group.gather(bytes([rank]) * (length + rank))
        if found != [bytes([each]) * (length + each) for each in range(size)]:
            wrong.append(f"messages of {length}")
    assert wrong == []


@pytest.mark.parametrize(("size", "seed"), wide([(3, 0), (2, 1), (4, 2), (8, 3), (16, 4)], 1))
@on_ranks()
def test_collectives_come_in_any_order(seed) -> None:
    """A hundred of them in a random order, on ranks that come at random times, against gloo."""
    group = join()
    process_group, size = group.process_group, group.size
    draws, own = random.Random(seed), random.Random(seed * 100 + group.rank)
    for step in range(100):
        length = min(draws.choice(LENGTHS[1:5]), MOST // size**2)
        dtype = draws.choice(DTYPES[:2])
        x = values(length * size, dtype, group.rank + step)
        time.sleep(own.choice([0, 0, 0, 0.0005, 0.003]))
        kind = draws.randrange(4)
        if kind == 0:
            found, expected = x.clone(), x.clone()
            direct.all_reduce(found, process_group, MAX)
            dist.all_reduce(expected, MAX)
        elif kind == 1:
            found, expected = direct.all_gather(x, process_group), x.new_empty(len(x) * size)
            dist.all_gather_into_tensor(expected, x)
        elif kind == 2:
            found = direct.all_to_all(x, [length] * size, [length] * size, process_group)
            expected = torch.empty_like(x)
            dist.all_to_all_single(expected, x)
        else:
            assert group.gather((step, group.rank)) == [(step, rank) for rank in range(size)]
            continue
        assert torch.equal(found, expected)


@on_ranks()
def test_any_thread_may_call() -> None:
    """Two models of the same ranks, each computing in a thread of its own, one after the other."""
    group = join()
    turn, found = threading.Semaphore(1), []

    def sums(number: int) -> None:
        for step in range(20):
            with turn:
                x = torch.full((5,), float(number * 100 + step))
                direct.all_reduce(x, group.process_group, MAX)
                found.append(x[0].item() == number * 100 + step)

    for number in range(2):
        thread = threading.Thread(target=sums, args=(number,))
        thread.start()
        thread.join()
    assert found == [True] * 40


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("variable", "TP_TRANSFORMERS_SHARED_MEMORY=0"),
        ("processor", "it needs Linux on x86-64"),
        ("nowhere", "rank 0 can reserve no memory: [Errno 2] No such file or directory"),
        ("full", "rank 0 can reserve no memory: "),
        ("", ""),
    ],
)
@on_ranks()
def test_ranks_that_may_not_share_memory_say_why_once(how, why) -> None:
    with logged(joining.__name__, logging.INFO) as messages, pytest.MonkeyPatch.context() as context:
        if how == "variable":
            context.setenv(joining.VARIABLE, "0")
        elif how == "processor":
            context.setattr(segment.platform, "machine", lambda: "aarch64")
        elif how == "nowhere":
            context.setattr(segment, "FOLDER", FOLDER / "nowhere")
            context.setattr(segment, "is_supported", lambda: True)
            context.setattr(joining, "is_supported", lambda: True)
        elif how == "full":
            context.setattr(segment, "SLOT", 1 << 60)
        group = join()
        group = join()  # it is said once
    x = torch.tensor([group.rank + 1.0])
    direct.all_reduce(x, group.process_group)
    assert x.item() == 3.0
    assert (transport_of(group.process_group) is not BACKEND) == (not how)
    assert len(messages) == (1 if how else 0)
    assert not how or f"not through shared memory: {why}" in messages[0]


@pytest.mark.parametrize("again", range(3))
@on_ranks()
def test_the_file_has_no_name_once_all_have_mapped_it(again) -> None:
    group = join()
    assert transport_of(group.process_group) is not BACKEND
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if "tp_transformers-" in line]
    assert mapped
    assert all(line.rstrip().endswith("(deleted)") for line in mapped)
    assert not {line.split()[-2] for line in mapped} & {*map(str, FOLDER.iterdir())}


@on_ranks()
def test_a_fork_of_a_rank_is_no_rank() -> None:
    group = join()
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            direct.all_reduce(torch.ones(1), group.process_group)
        except Exception as error:
            os.write(writes, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    x = torch.ones(1)
    direct.all_reduce(x, group.process_group)
    os.close(writes)
    with open(reads) as pipe:
        said = "DistBackendError: a collective through shared memory: this process is a fork of a rank"
        assert pipe.read() == said
    assert x.item() == 2.0


def different() -> list[str]:
    """Run on every rank: what each raises where one sums and the other gathers."""
    group, raised = join(), []
    sums = partial(direct.all_reduce, torch.ones(3), group.process_group)
    gathers = partial(transport_of(group.process_group).messages, b"abc")
    for _ in range(2):
        with pytest.raises(MeshError) as caught:
            sums() if group.rank else gathers()
        raised.append(str(caught.value))
    dist.barrier()
    return raised


def test_ranks_in_different_collectives_do_not_take_one_for_the_other(pool) -> None:
    first, second = pool.run(2, different)
    assert first == second
    assert ["a vote" in error and "all_reduce of float32 (3,)" in error for error in first] == [True, True]


@on_ranks()
def test_compiled_collectives_go_through_memory() -> None:
    """They are those that are not compiled, on ranks of which one compiles as well."""
    group = join()

    def all_of_them(x: Tensor) -> tuple[Tensor, ...]:
        summed, largest = x.clone(), x.clone()
        direct.all_reduce(summed, group.process_group)
        direct.all_reduce(largest, group.process_group, MAX)
        counts = [len(x) // group.size] * group.size
        return (
            summed,
            largest,
            direct.all_gather(x, group.process_group),
            direct.reduce_scatter(x, group.process_group),
            direct.all_to_all(x, counts, counts, group.process_group),
        )

    x = values(12 * 5, torch.float32, group.rank).view(12, 5)
    expected = all_of_them(x)
    compiled = torch.compile(all_of_them, fullgraph=True)
    before = transport_of(group.process_group).collectives
    both = compiled(x)
    own = transport_of(group.process_group).collectives - before
    one = (compiled if group.rank else all_of_them)(x)
    assert own == 5
    assert all(torch.equal(a, b) for found in (both, one) for a, b in zip(found, expected, strict=True))


def test_the_length_of_a_step_leaves_room() -> None:
    assert memory.ONE_STEP <= SLOT
    assert 4 * SLOT <= 8 << 20  # bytes of a rank
