"""The end of a process group on stand-ins for GPUs: NCCL is aborted at once, steps that were cut off are noticed."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.features.watch.unit.test_watch import watch_on
from tp_transformers import MeshError
from tp_transformers.features.watch import device
from tp_transformers.features.watch.device import Steps, check_unchanged
from tp_transformers.features.watch.failure import lost
from tp_transformers.features.watch.poller import POLLER
from tp_transformers.ranks import mesh
from tp_transformers.ranks.group import TensorParallelGroup

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
WAIT = 20.0


class Event:
    """An event of a GPU, behind kernels that have finished or not."""

    is_done = True
    calls: list[str]

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        self.calls.append("query")
        return self.is_done


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of the stand-in for a GPU, in their order."""
    made: list[str] = []
    monkeypatch.setattr(Event, "calls", made, raising=False)
    module = mock.Mock(Event=Event)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    return made


@pytest.fixture
def groups(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two groups of NCCL, whose aborts wait for the other's kernels, and one of gloo."""
    met = threading.Barrier(2)

    def group(name: str) -> Any:
        return mock.Mock(**{"abort.side_effect": lambda: (met.wait(WAIT), calls.append(f"abort {name}"))})

    found = {group("tp"): "cpu:gloo,cuda:nccl", group("dp"): "cuda:nccl", group("cpu"): "cpu:gloo,cuda:gloo"}
    monkeypatch.setattr(device, "world", mock.Mock(pg_map=found))
    monkeypatch.setattr(device, "get_backend_config", found.get)
    return list(found)


def test_all_communicators_are_aborted_at_once_and_the_poller_goes_on(groups, calls) -> None:
    watch = watch_on("cuda:0")
    watch.process_group = groups[0]
    watch.steps.begin()
    watch.steps.end()
    with mock.patch.object(POLLER, "all", return_value=[watch]), ThreadPoolExecutor(1) as poller:
        poller.submit(watch.conclude, lost(1, 10)).result(WAIT / 4)
    assert watch.steps.is_aborted.wait(2 * WAIT)
    assert calls[0] == "query", "before an abort lets kernels go on"
    assert sorted(calls[1:]) == ["abort dp", "abort tp"]


def test_a_group_that_is_never_aborted_blocks_nothing(groups, calls) -> None:
    waits, never = threading.Barrier(3), threading.Event()
    groups[0].abort.side_effect = groups[1].abort.side_effect = lambda: (waits.wait(WAIT), never.wait(WAIT))
    watch = watch_on("cuda:0")
    with mock.patch.object(POLLER, "all", return_value=[watch]), ThreadPoolExecutor(1) as poller:
        poller.submit(watch.conclude, lost(1, 10)).result(WAIT)
    waits.wait(WAIT)
    assert watch._concluded.is_set()
    assert not watch.steps.is_aborted.is_set()
    never.set()
    assert watch.steps.is_aborted.wait(WAIT)


def steps(count: int, *, is_done: bool = True, raises: bool = False, is_aborted: bool = True) -> Steps:
    """Steps of a rank on a GPU, once NCCL was aborted."""
    made = Steps(GPU)
    for _ in range(count):
        made.begin()
        made.end()
    made._last.is_done = is_done
    if raises:
        made.begin()
    made.cut()
    if is_aborted:
        made.is_aborted.set()
    return made


def refusals(*of_ranks: Steps, store: dist.Store | None = None) -> list[str]:
    """What each rank raises where all renew their process group; "" for none."""
    store = store or dist.HashStore()

    def check(rank: int) -> str:
        try:
            check_unchanged(TensorParallelGroup(None, rank, len(of_ranks), GPU), of_ranks[rank], store)
        except MeshError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(of_ranks)) as ranks:
        return list(ranks.map(check, range(len(of_ranks))))


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the probe of a GPU succeed, or raise an error."""

    def succeed(error: Exception | None = None) -> None:
        zeros: Callable[..., torch.Tensor] = torch.empty
        monkeypatch.setattr(device.torch, "zeros", mock.Mock(side_effect=error, return_value=zeros(1)))

    succeed()
    return succeed


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([{"count": 3}, {"count": 3}], ""),
        ([{"count": 3}, {"count": 3, "is_done": False}], "a step of an optimizer that was cut off on rank 1"),
        ([{"count": 3, "raises": True}, {"count": 3}], "a step of an optimizer that was cut off on rank 0"),
        ([{"count": 4}, {"count": 3}], "ranks that have made 3 and 4 steps of optimizers"),
    ],
)
def test_parameters_that_may_have_changed_are_not_used(calls, probes, ranks, says) -> None:
    """What follows an aborted collective in a stream reads garbage, and a step writes that to parameters."""
    for found in refusals(*(steps(**rank) for rank in ranks)):
        assert says in found
        assert bool(says) == ("Start all ranks again, and load the last checkpoint." in found)


def test_a_gpu_that_fails_is_refused_on_all_ranks(calls, probes) -> None:
    """Sampling from what an aborted gather left trips an assertion in the kernel of a rank that has not failed."""
    probes(torch.AcceleratorError("CUDA error: device-side assert triggered\nmore lines"))
    for found in refusals(steps(1), steps(1)):
        assert "a GPU that fails (AcceleratorError: CUDA error: device-side assert triggered) on rank 0" in found


def test_a_rank_asks_again_once_its_graphs_are_gone(calls, probes, monkeypatch) -> None:
    monkeypatch.setattr(device, "ABORTING", 0.01)
    store, own = dist.HashStore(), (steps(1), steps(1, is_aborted=False))
    assert all("as where a CUDA graph holds it on rank 1" in found for found in refusals(*own, store=store))
    own[1].is_aborted.set()
    assert refusals(*own, store=store) == ["", ""]


@pytest.mark.parametrize(("is_gpu", "compiled"), [(True, 2), (False, 1)])
def test_graphs_are_dropped_before_their_communicators(monkeypatch, is_gpu, compiled) -> None:
    """NCCL waits for CUDA graphs, and a graph that is replayed later waits for ever. On a CPU there are none."""
    times = []

    def backend(graph: Any, inputs: Any) -> Any:
        times.append(len(times))
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=backend)
    function(torch.ones(2))
    assert "torch._dynamo" in sys.modules
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_gpu)
    mesh.forget_graphs()
    function(torch.ones(2))
    assert len(times) == compiled


@pytest.mark.parametrize(
    ("config", "size", "count"), [("cpu:gloo,cuda:nccl", 2, 1), ("cuda:nccl", 1, 0), ("cpu:gloo", 2, 0)]
)
def test_a_communicator_is_made_before_a_rank_can_fail_alone(calls, monkeypatch, config, size, count) -> None:
    """The first collective makes it, and the ranks that wait in that cannot be told of a failure."""
    group, reduced = mock.Mock(**{"size.return_value": size}), mock.Mock()
    for name in ("connect", "check_gpus", "get_default_store", "PrefixStore"):
        monkeypatch.setattr(mesh, name, mock.Mock())
    monkeypatch.setattr(mesh, "get_backend_config", lambda group: config)
    monkeypatch.setattr(mesh.torch, "zeros", lambda *sizes, **kind: kind["device"])
    monkeypatch.setattr(mesh.dist, "all_reduce", reduced)
    axis = mock.Mock(device_type="cuda", **{"get_group.return_value": group, "mesh.ndim": 1})
    monkeypatch.setattr(mesh, "_tp_axis", lambda axis: axis)
    monkeypatch.setattr(mesh, "local_device", lambda kind: GPU)
    mesh.join(axis)
    assert reduced.call_args_list == [mock.call(GPU, group=group)] * count
