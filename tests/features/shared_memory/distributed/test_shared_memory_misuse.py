"""Collectives through shared memory where they are traced, watched, broken off, or called out of step."""

import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import PROMPTS, load
from tests.support.on_ranks import on_ranks
from tp_transformers import MeshError, RemoteRankError, renew_process_group
from tp_transformers.features.shared_memory.memory import SharedMemory
from tp_transformers.features.shared_memory.segment import SLOT
from tp_transformers.ranks import direct
from tp_transformers.ranks.collectives import reduce_scatter_from_region
from tp_transformers.ranks.direct import connect, transport_of
from tp_transformers.ranks.mesh import join

# -- under torch.compile


@on_ranks()
def test_a_compiled_graph_keeps_the_order_of_collectives() -> None:
    """Of two sums in one graph, of shards whose lengths suggest another order on each rank."""
    group, size = join(), 64
    width = (64, 96)[group.rank]

    def two(x: Tensor, a: Tensor, a2: Tensor, b: Tensor, b2: Tensor, b3: Tensor) -> tuple[Tensor, Tensor]:
        wide, narrow = torch.mm(x, a), torch.mm(torch.mm(x, b), b2)
        first = torch.mm(narrow, b3)
        direct.all_reduce(first, group.process_group)
        second = torch.mm(wide, a2)
        direct.all_reduce(second, group.process_group)
        return first, second

    x = torch.full((size, size), 1 / size)
    weights = (
        torch.full((size, width), 1.0),
        torch.full((width, size), 100 / width),
        torch.ones(size, 8),
        torch.full((8, 8), 1 / 8),
        torch.full((8, size), 1 / 8),
    )
    with torch.no_grad():
        pairs = two(x, *weights), torch.compile(two)(x, *weights)
    eager, compiled = ([round(value[0, 0].item(), 3) for value in pair] for pair in pairs)
    assert eager == compiled == [2.0, 200.0]


@pytest.mark.slow
@on_ranks()
def test_a_compiled_graph_makes_collectives_that_a_rank_has_no_use_for() -> None:
    group = join()
    widths = (4, 0)

    def of_rows(x: Tensor) -> Tensor:
        return reduce_scatter_from_region(x, widths, group.process_group, dim=0).sum()

    def of_a_slice(x: Tensor) -> Tensor:
        total = x * 2
        direct.all_reduce(total, group.process_group)
        return total[: widths[group.rank]].sum()

    memory, counts, results = transport_of(group.process_group), [], []
    with torch.no_grad():
        for function in (of_rows, of_a_slice):
            compiled = torch.compile(function)
            before = memory.collectives
            results.append(compiled(torch.ones(4, 3)).item())
            counts.append(memory.collectives - before)
    assert counts == [1, 1]
    assert results == [[24.0, 48.0], [0.0, 0.0]][group.rank]


# -- under a dispatch mode


class Seen(TorchDispatchMode):
    """Keeps the dtypes that operators give."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.dtypes.add(result.dtype)
        return result


@on_ranks()
def test_modes_neither_see_nor_make_slots() -> None:
    """A mode sees the first sum of a shape, and a sum follows one with fake tensors."""
    group = join()
    with Seen() as seen:
        direct.all_reduce(torch.ones(13), group.process_group)
    with FakeTensorMode(allow_non_fake_inputs=True):
        direct.all_reduce(torch.ones(7), group.process_group)
    x = torch.ones(7)
    direct.all_reduce(x, group.process_group)
    assert seen.dtypes == {torch.float32}
    assert x.tolist() == [2.0] * 7


# -- tensors of any kind


@on_ranks()
def test_tensors_of_any_kind() -> None:
    """Non-contiguous ones, parameters, and dtypes that torch cannot add."""
    group = join()
    pg = group.process_group
    numbers = torch.arange(600 * 1024, dtype=torch.float)  # more than a slot
    sent = numbers.view(600, 1024).t()
    taken = sent.clone(memory_format=torch.preserve_format) * (group.rank == 0)
    direct.broadcast(taken, pg, 0)
    column = torch.ones(8, 2)
    direct.all_reduce(column[:, 0], pg)
    param = torch.nn.Parameter(torch.ones(3))
    gathered = direct.all_gather(param, pg)
    direct.all_reduce(param, pg)
    with pytest.raises(NotImplementedError, match="add_stub"):
        direct.all_reduce(torch.ones(4).to(torch.uint16), pg)
    after = torch.ones(3)
    direct.all_reduce(after, pg)
    assert torch.equal(taken, sent)
    assert column.tolist() == [[2.0, 1.0]] * 8
    assert gathered.tolist() == [1.0] * 6
    assert param.tolist() == after.tolist() == [2.0] * 3


# -- broken off, or out of step


def broken_off() -> tuple[str, str]:
    """Run on every rank: an error of a signal handler between the steps of a collective, and one after it."""
    group = join()
    second = dist.new_group(timeout=timedelta(seconds=2))
    connect(second)
    raised = []

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as context:
        if group.rank == 0:
            context.setattr(SharedMemory, "_wait", stop)
        try:
            direct.all_reduce(torch.ones(3), second)
        except KeyboardInterrupt:
            raised.append("interrupted")
    try:
        direct.all_reduce(torch.ones(3), second)
    except dist.DistBackendError as error:
        raised.append(str(error))
    dist.barrier()
    return raised[0] if group.rank == 0 else "", raised[-1]


def test_a_collective_that_is_broken_off_anywhere_is_the_last(pool) -> None:
    (first, after), (_, other) = pool.run(2, broken_off)
    assert first == "interrupted"
    assert "an earlier one was broken off" in after
    assert "the timeout of the group, for rank 0 of it" in other


@on_ranks()
def test_a_signal_handler_may_not_call_a_collective_inside_of_another() -> None:
    """It comes while rank 0 waits in another one."""
    group = join()
    second = dist.new_group(timeout=timedelta(seconds=20))
    connect(second)
    memory = transport_of(second)
    if group.rank == 0:
        before = signal.signal(signal.SIGUSR1, lambda *_: memory.messages(b""))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(dist.DistBackendError, match="called by a signal handler inside of another one"):
            direct.all_reduce(torch.ones(3), second)
        signal.signal(signal.SIGUSR1, before)
    dist.barrier()


@on_ranks()
def test_pieces_of_a_long_tensor_are_not_taken_for_short_ones() -> None:
    """A tensor of two slots on rank 0, of one slot on rank 1; then a sum."""
    group = join()
    with pytest.raises(MeshError) as raised:
        direct.all_reduce(torch.ones((2, 1)[group.rank] * SLOT // 4), group.process_group)
    for length in (SLOT // 2, SLOT // 4):
        assert f"all_reduce of float32 ({length},)" in str(raised.value)
    x = torch.ones(SLOT // 2)
    direct.all_reduce(x, group.process_group)
    assert x.mean() == 2


@on_ranks()
def test_ranks_that_were_all_interrupted_go_on_with_a_new_process_group(folder) -> None:
    model = load(folder)
    expected = model(PROMPTS).logits
    memory = transport_of(model.tp_group.process_group)
    memory.end("an earlier one was broken off")
    dist.barrier()
    with pytest.raises((RemoteRankError, dist.DistBackendError)):
        model(PROMPTS)
    with pytest.raises(RemoteRankError):
        model(PROMPTS)
    renew_process_group(model)
    assert torch.equal(model(PROMPTS).logits, expected)
