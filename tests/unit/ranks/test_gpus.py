"""The GPUs of the ranks before NCCL starts: one for each, and bound to the process group where torch can split it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tp_transformers.errors import MeshError
from tp_transformers.ranks import mesh

UUIDS = ["GPU-aaaa", "GPU-bbbb", "GPU-aaaa"]
"""Of ranks 0 to 2: a launcher gave the first and the last the same visible GPU."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    """Threads that are ranks; rank r has the visible GPU with UUIDS[r]."""
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUIDS[device.index], name="A GPU")
    )
    with ThreadPoolExecutor(3) as threads:
        yield threads


def checked(threads: ThreadPoolExecutor, size: int) -> list[Exception | None]:
    """The error of every rank."""
    store = dist.HashStore()

    def check(rank: int) -> None:
        mesh.check_gpus(store, rank, size, torch.device("cuda", rank))

    return [job.exception() for job in [threads.submit(check, rank) for rank in range(size)]]


def test_two_ranks_of_one_gpu_are_an_error_of_all(gpus) -> None:
    """NCCL raises "Duplicate GPU detected" on some ranks, and the others wait."""
    assert checked(gpus, 2) == [None, None]
    errors = checked(gpus, 3)
    assert {type(error) for error in errors} == {MeshError}
    assert len({str(error) for error in errors}) == 1
    assert "rank 2: got the same GPU as rank 0 (GPU-aaaa)" in str(errors[0])
    assert "--nproc-per-node" in str(errors[0])
    assert "CUDA_VISIBLE_DEVICES=" in str(errors[0])


def test_an_nccl_that_takes_several_ranks_of_a_gpu(gpus, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert checked(gpus, 3) == [None] * 3


class Mesh(SimpleNamespace):
    """A mesh of this rank and another, of a backend."""

    def get_group(self) -> Any:
        return SimpleNamespace(size=lambda: 2, rank=lambda: 0, backend=self.backend)


@pytest.mark.parametrize(
    ("backend", "is_checked"), [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo,cuda:gloo", False)]
)
def test_a_mesh_of_the_user_is_checked_where_nccl_sums(monkeypatch, backend, is_checked) -> None:
    found: list[Any] = []
    axis, given = (Mesh(backend=backend, device_type="cuda", mesh=torch.arange(2)) for _ in range(2))
    monkeypatch.setattr(mesh, "_tp_axis", lambda _: axis)
    monkeypatch.setattr(mesh, "local_device", lambda kind: torch.device("cuda", 0))
    monkeypatch.setattr(mesh, "bind_thread", lambda device: None)
    monkeypatch.setattr(mesh, "prepare", lambda group, device: found.append("connect"))
    monkeypatch.setattr(mesh, "get_backend_config", lambda group: group.backend)
    monkeypatch.setattr(mesh, "get_default_store", dist.HashStore)
    monkeypatch.setattr(mesh, "check_gpus", lambda store, *own: found.append(own))
    monkeypatch.setattr(mesh.TensorParallelGroup, "of_mesh", lambda axis, _, *, mesh: (axis, mesh))
    assert mesh.join(given) == (axis, given)  # type: ignore[arg-type, comparison-overlap]
    assert found == [(0, 2, torch.device("cuda", 0))] * is_checked + ["connect"]


@pytest.mark.parametrize(
    ("size", "backend", "sums"),
    [(2, "cuda:nccl", 1), (2, "cpu:gloo,cuda:nccl", 1), (1, "cuda:nccl", 0), (2, "cpu:gloo,cuda:gloo", 0)],
)
def test_nccl_connects_while_all_ranks_are_there(monkeypatch, size, backend, sums) -> None:
    calls: list[str] = []
    monkeypatch.setattr(mesh, "connect", lambda group: calls.append("connect"))
    monkeypatch.setattr(mesh, "get_backend_config", lambda group: backend)
    monkeypatch.setattr(mesh.dist, "all_reduce", lambda x, group: calls.append("sum"))
    module = SimpleNamespace(synchronize=lambda device: calls.append("wait"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    mesh.prepare(SimpleNamespace(size=lambda: size), torch.device("cpu"))  # type: ignore[arg-type]
    assert calls == ["connect"] + ["sum", "wait"] * sums


@pytest.mark.parametrize(("has_gpu", "compiled"), [(True, True), (True, False), (False, True)])
def test_graphs_go_where_they_may_hold_communicators(monkeypatch, has_gpu, compiled) -> None:
    resets: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_gpu)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(None))
    monkeypatch.setattr(mesh.sys, "modules", {"torch._dynamo": None} if compiled else {})
    mesh.forget_graphs()
    assert len(resets) == (has_gpu and compiled)


def test_switches_of_threads_with_a_name(tmp_path, monkeypatch) -> None:
    for number, (name, state, switches) in enumerate([("a", "S", 5), ("b", "S", 6), ("a", "S", 7), ("b", "R", 8)]):
        (tmp_path / str(number)).mkdir()
        counts = f"voluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t0"
        text = f"Name:\t{name}\nState:\t{state} (state)\nVmRSS:\t{number} kB\n{counts}\n"
        (tmp_path / str(number) / "status").write_text(text)
    (tmp_path / "ended").mkdir()
    monkeypatch.setattr(mesh, "Path", lambda _: tmp_path)
    zero = "nonvoluntary_ctxt_switches:\t0"
    assert sorted(mesh._context_switches("a") or []) == [
        zero,
        zero,
        *(f"voluntary_ctxt_switches:\t{n}" for n in (5, 7)),
    ]
    assert mesh._context_switches("b") is None, "one runs"
    assert mesh._context_switches("c") == []


@pytest.mark.parametrize(("release", "binds"), [("2.8.0", False), ("2.9.1", False), ("2.10.0", True), ("2.13.0", True)])
def test_a_group_is_bound_to_its_gpu_where_torch_can_split_it(monkeypatch, release, binds) -> None:
    """torch 2.8 refuses to split a group of two backends, and 2.9 gives all parts of it one name in the store."""
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(release))
    started: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, device_id, **__: started.append(device_id))
    monkeypatch.setattr(mesh, "find_store", lambda: (dist.HashStore(), 0, 2))
    monkeypatch.setattr(mesh, "features", dict)
    monkeypatch.setattr(mesh, "check_gpus", lambda *own: None)
    monkeypatch.setattr(mesh, "local_device", lambda kind: device)
    monkeypatch.setattr(mesh, "bind_thread", lambda device: None)
    monkeypatch.setattr(mesh.atexit, "register", lambda function: None)
    mesh._start_process_group()
    assert started == [device if binds else None]
