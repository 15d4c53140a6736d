"""All-reduces of CUDA tensors, with gloo ranks in place of GPUs: their sums, and faults of some ranks."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.support.gpus import NOW, facts, gpus
from tests.support.pool import Pool
from tests.support.tiers import wide
from tp_transformers.ranks import direct
from tp_transformers.ranks.all_reduce import checked, transport, ways
from tp_transformers.ranks.all_reduce.choice import Way
from tp_transformers.ranks.all_reduce.transport import VALUES, VARIABLE, transport_of
from tp_transformers.ranks.direct import MAX
from tp_transformers.ranks.mesh import join
from tp_transformers.ranks.transports import set_up

pytestmark = pytest.mark.distributed

OTHERS = tuple(way.value for way in Way if way is not Way.NCCL)


def numbers(generator: random.Random, rank: int, *, strided: bool) -> Tensor:
    """Integers in a tensor of a random dtype, length and layout; strided ones only for the ways, as gloo takes none."""
    dtype = generator.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
    length = generator.choice([0, 1, 3, 8, 64, 1023, 1024, 2048, 5000])
    x = torch.randint(-9, 9, (length + 1, 2), generator=torch.Generator().manual_seed(generator.randrange(99) + rank))
    layout = generator.randrange(4)
    x = x.to(dtype)
    if layout == 0 and strided and dtype in (torch.float32, torch.bfloat16):
        return x[:, 0]
    if layout == 1:
        return x.view(-1)[1:]
    return x if layout == 2 else x.t()


def every_sum(value: str, deterministic: bool) -> tuple[list[str], list[str], set[str]]:
    """Run on every rank: sums unlike those of all inputs, warnings, and the operators that were called."""
    wrong = []
    with gpus(value) as (patch, warnings):
        if deterministic:
            patch.setattr(transport, "facts_of", lambda device: replace(facts(device), deterministic=True))
        group = join()
        process_group, generator = group.process_group, random.Random(value)
        accelerated = transport_of(process_group)
        NOW.calls.clear()
        for step in range(30):
            x = numbers(generator, group.rank, strided=value != "nccl")
            parts = group.gather(x)
            expected, before = sum(parts[1:], parts[0].clone()), x.untyped_storage().tolist()
            with torch.inference_mode(step % 3 == 0), CommDebugMode() if group.rank == step % 5 else torch.no_grad():
                y = x if step % 3 else x.clone(memory_format=torch.preserve_format)
                direct.all_reduce(y, process_group)
            if not torch.equal(y, expected):
                wrong.append(f"{step}: {tuple(x.shape)} of {x.dtype}")
            if x._base is not None and x.ndim == 1 and y is x:
                x.copy_(parts[group.rank])
                if x.untyped_storage().tolist() != before:
                    wrong.append(f"{step}: beside {tuple(x.shape)} of {x.dtype}")
        x = torch.tensor([float(group.rank), 5.0])
        direct.all_reduce(x, process_group, MAX)
        wrong += [] if x.tolist() == [group.size - 1, 5.0] else ["a maximum"]
        assert (accelerated is None) == (value == "nccl")
        assert accelerated is None or accelerated.collectives > 3
        return wrong, warnings, set(NOW.calls)


SHORT = {"one_shot_all_reduce_copy_out", "one_shot_all_reduce_out"}


@pytest.mark.parametrize(
    ("value", "size", "called"),
    wide(
        [
            ("auto", 2, SHORT),
            ("two_shot", 3, {"two_shot_all_reduce_"}),
            ("nccl_symmetric", 2, {"nccl_symmetric"}),
            ("multimem", 2, {"multimem_all_reduce_"}),
            ("one_shot", 3, SHORT),
            ("nccl", 2, set()),
            ("auto", 4, SHORT | {"nccl_symmetric"}),  # nothing else has kernels for float16
        ],
        2,
    ),
)
def test_sums_are_those_of_all_inputs(pool: Pool, value: str, size: int, called: set[str]) -> None:
    assert pool.run(size, every_sum, value, False) == [([], [], called)] * size


@pytest.mark.slow
def test_deterministic_ranks_sum_in_their_order(pool: Pool) -> None:
    assert pool.run(4, every_sum, "auto", True) == [([], [], SHORT)] * 4
    for _, warnings, called in pool.run(2, impossible, "multimem"):
        assert not called
        assert not warnings or "use_deterministic_algorithms" in warnings[0]


def impossible(value: str) -> tuple[bool, list[str], list[str]]:
    """Run on every rank: a way that is asked for and cannot be."""
    with gpus(value) as (patch, warnings):
        patch.setattr(transport, "facts_of", lambda device: replace(facts(device), deterministic=True))
        group = join()
        return transport_of(group.process_group) is not None, warnings, NOW.calls


def failing(how: str, culprits: list[int], value: str) -> tuple[list[str], list[str], float]:
    """Run on every rank: the ways that are left after a fault of some ranks, warnings, and a sum."""
    is_culprit = int(os.environ["RANK"]) in culprits

    def raises(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no access")

    def fault(name: str, result: Tensor) -> None:
        if how == "operator" and name.startswith("one"):
            raise RuntimeError("no access")
        if how == "wrong" and not name.startswith("two"):
            result[0] += 1

    with gpus(value) as (patch, warnings):
        if is_culprit:
            NOW.fault = fault
            if how in ("empty_symmetric", "rendezvous_symmetric"):
                patch.setattr(ways, how, raises)
            if how == "facts":
                patch.setattr(transport, "facts_of", raises)
        group = join()
        NOW.fault = lambda name, result: None
        left = transport_of(group.process_group)
        x = torch.arange(600.0) + group.rank
        direct.all_reduce(x, group.process_group)
        assert torch.equal(x, torch.arange(600.0) * group.size + sum(range(group.size)))
        return [] if left is None else sorted(way.value for way in left.buffers), warnings, x[0].item()


@pytest.mark.parametrize(
    ("how", "culprits", "value", "left", "why"),
    wide(
        [
            ("wrong", [1], "one_shot", [], "one_shot: it returned a wrong sum of 1 elements of torch.float32 (rank 1)"),
            ("empty_symmetric", [1], "auto", ["nccl_symmetric"], "two_shot: RuntimeError: no access (rank 1)"),
            ("rendezvous_symmetric", [2], "multimem", [], "multimem: RuntimeError: no access (rank 2)"),
            ("facts", [1], "auto", [], "one_shot: RuntimeError: no access (rank 1)"),
            ("wrong", [1], "auto", ["two_shot"], "nccl_symmetric: it returned a wrong sum"),
            (
                "operator",
                [0, 1, 2, 3],
                "auto",
                ["multimem", "nccl_symmetric", "two_shot"],
                "one_shot: RuntimeError: no access",
            ),
        ],
        4,
    ),
)
def test_a_way_that_fails_on_one_rank_is_used_by_none(
    pool: Pool, how: str, culprits: list[int], value: str, left: list[str], why: str
) -> None:
    for rank, (kept, warnings, _) in enumerate(pool.run(4, failing, how, culprits, value)):
        assert kept == left
        assert len(warnings) == (rank == 0)
        assert rank or why in warnings[0]


def hanging(how: str) -> None:
    """Run on every rank: a kernel that never ends, on rank 1 alone or on all since rank 1 did not launch it."""
    rank = int(os.environ["RANK"])
    with gpus("two_shot"):
        if how == "alone":
            check = checked._is_done
            checked._is_done = lambda query: rank != 1 and check(query)  # type: ignore[assignment]
        else:
            NOW.hangs = True

            def raises(name: str, result: Tensor) -> None:
                raise RuntimeError("no kernel image")

            NOW.fault = raises if rank == 1 else NOW.fault
        try:
            join()
        finally:
            if how == "alone":
                checked._is_done = check


@pytest.mark.parametrize(
    ("how", "got"),
    [
        ("alone", "no result on rank 1 after 0.5 s,"),
        ("all", "no result on rank 0 after 0.5 s; RuntimeError: no kernel image (rank 1),"),
    ],
)
def test_a_kernel_that_hangs_is_one_error_on_all_ranks(pool: Pool, how: str, got: str) -> None:
    error = pool.error(3, hanging, how)
    assert error.startswith(f"MeshError: the all-reduce 'two_shot': got {got}")
    assert f"{VARIABLE}=nccl" in error


def asking(values: list[str]) -> list[str]:
    """Run on every rank: the value that this rank asks for."""
    with gpus(values[int(os.environ["RANK"])]):
        join()
    return NOW.calls


@pytest.mark.parametrize(
    ("values", "got"),
    [
        (["fast", "fast"], "got 'fast' on rank 0, expected one of nccl, auto, "),
        (["auto", "one_shto"], "got 'one_shto' on rank 1, "),
        (["auto", "nccl"], "got 'nccl' on rank 1 and 'auto' on rank 0, "),
    ],
)
def test_an_unknown_value_is_an_error_on_all_ranks(pool: Pool, values: list[str], got: str) -> None:
    error = pool.error(2, asking, values)
    assert error.startswith(f"MeshError: {VARIABLE}: {got}")
    assert "nearest: one_shot" in error or values[1] != "one_shto"


def groups_that_end() -> tuple[bool, bool, str]:
    """Run on every rank: a transport after its group ended, and one after a group with the same name."""
    with gpus("one_shot") as (patch, warnings):
        first = join()
        assert transport_of(first.process_group) is not None
        second = dist.new_group()
        set_up(second)
        number = id(second)
        assert transport._transports[number] is not None
        transport._transports[number].end("the group has ended")
        with pytest.raises(dist.DistBackendError, match="the group has ended"):
            direct.all_reduce(torch.ones(8), second)
        dist.destroy_process_group(second)
        NOW.group = second = None
        gc.collect()
        is_gone = number not in transport._transports
        patch.setattr(ways, "_NAMES", {first.process_group.group_name})
        transport._transports.clear()
        set_up(first.process_group)
        return is_gone, transport_of(first.process_group) is None, "".join(warnings)


def test_a_transport_ends_with_its_group(pool: Pool) -> None:
    for is_gone, is_refused, warning in pool.run(2, groups_that_end):
        assert is_gone
        assert is_refused
        assert not warning or "an earlier group with this name has ended" in warning


class Stream:
    """A stream that keeps those that it waited for."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


def in_a_capture() -> None:
    """Run on every rank: other streams, and a capture on a third."""
    x = torch.ones(8)
    with gpus("nccl_symmetric") as (patch, _):
        process_group = join().process_group
        NOW.captures = True
        NOW.calls.clear()
        direct.all_reduce(x, process_group)  # by the backend
        assert not NOW.calls
    with gpus("one_shot") as (patch, _):
        second = dist.new_group()
        set_up(second)
        first, other, third = Stream(), Stream(), Stream()
        for stream, captures, waits in ((first, 0, 1), (first, 0, 1), (other, 0, 1), (third, 1, 0), (first, 0, 2)):
            NOW.captures = bool(captures)
            patch.setattr(torch.cpu, "current_stream", lambda stream=stream: stream)
            NOW.calls.clear()
            direct.all_reduce(x, second)
            assert NOW.calls == ["one_shot_all_reduce_copy_out"]
            assert len(stream.waited) == waits
        assert other.waited == [first]
        assert first.waited[1] is third


def test_streams_and_captures(pool: Pool) -> None:
    pool.run(2, in_a_capture)


def by_default() -> bool:
    """Run on every rank: True if there is no transport."""
    with gpus(None):
        return transport_of(join().process_group) is None and not NOW.symmetric


def test_it_is_off_by_default(pool: Pool) -> None:
    assert pool.run(2, by_default) == [True, True]
    assert ("nccl", "auto", *OTHERS) == VALUES
