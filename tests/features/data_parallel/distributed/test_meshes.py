"""Meshes that a model is loaded over: those that are right, and one clear error each for those that are not."""

from __future__ import annotations

import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tp_transformers
from tests.support.comparisons import gradient_differences, relative
from tests.support.models import PROMPTS, load, load_both
from tests.support.on_ranks import on_ranks
from tests.support.pool import WorkerError
from tests.support.tiers import wide


@pytest.mark.parametrize("mode", wide(["shard", "replicate"], 1))
@on_ranks(4)
def test_ranks_that_share_a_model_need_not_be_neighbours(folder, mode) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model, one_process = (each.train() for each in load_both(folder, device_mesh=mesh))
    tp_transformers.data_parallel(model, mesh, mode=mode)
    assert model.tp_group.global_ranks == ([0, 2] if dist.get_rank() % 2 == 0 else [1, 3])
    own = PROMPTS.chunk(2)[mesh["dp"].get_local_rank()]
    loss, expected = model(own, labels=own).loss, one_process(PROMPTS, labels=PROMPTS).loss
    loss.backward(), expected.backward()
    dist.all_reduce(mean := loss.detach() / dist.get_world_size())
    assert relative(mean, expected.detach()) < 1e-6
    norm = torch.nn.utils.clip_grad_norm_(one_process.parameters(), 0.5)
    assert relative(tp_transformers.clip_grad_norm_(model, 0.5), norm) < 1e-5
    assert max(gradient_differences(model, one_process).values()) < 1e-5  # fp32 sums in another order


AXES = ("dp", "tp")


@on_ranks(4)
def test_meshes_that_do_not_fit_are_one_error_on_all_ranks(folder) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    right, across = (DeviceMesh("cpu", ranks, mesh_dim_names=AXES) for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    model = load(folder, device_mesh=right)
    for attempt, text in (
        (
            lambda: load(folder, device_mesh=DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=AXES)),
            "device_mesh: got ranks [[0, 1], [3, 2]], expected ranks that ascend along every axis",
        ),
        (
            lambda: load(folder, device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))),
            "device_mesh: got 2 axes named ('dp', 'pp'), expected one axis, or an axis named 'tp'",
        ),
        (lambda: load(folder, device_mesh=right, tp_size=4), "tp_size: got 4, expected 2"),
        (
            lambda: load(folder, device_mesh=right, tp_size=3 if rank % 2 else None),
            "rank 1: tp_size: got 3, expected 2",
        ),
        (
            lambda: tp_transformers.data_parallel(model, across),
            "data_parallel: got a mesh whose tp axis is ranks [0, 2], expected ranks [",
        ),
        (
            lambda: tp_transformers.data_parallel(model, right, mode="replicate" if rank else "ddp"),  # type: ignore[arg-type]
            "data_parallel: got mode='ddp'",
        ),
        (
            lambda: load(folder, device_mesh=(2, 2)),
            "device_mesh: got (2, 2), expected a torch.distributed.device_mesh.DeviceMesh",
        ),
    ):
        with pytest.raises(tp_transformers.TensorParallelError, match=re.escape(text)):
            attempt()
    few = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    if rank < 2:
        assert load(folder, device_mesh=few).tp_size == 2
    else:
        text = f"device_mesh: got one of ranks [0, 1] on rank {rank}, expected one that this rank is in"
        with pytest.raises(tp_transformers.MeshError, match=f"^{re.escape(text)}"):
            load(folder, device_mesh=few)


def ranks_of_srun(folder: str, address: bool) -> tuple[int, int]:
    """As srun starts a rank, which knows nothing of torchrun."""
    theirs = {"SLURM_PROCID": "RANK", "SLURM_STEP_NUM_TASKS": "WORLD_SIZE", "SLURM_LOCALID": "LOCAL_RANK"}
    with mock.patch.dict(os.environ):
        for name, ours in theirs.items():
            os.environ[name] = os.environ.pop(ours)
        for name in ("MASTER_ADDR", "MASTER_PORT") if not address else ():
            del os.environ[name]
        model = load(folder)
        return model.tp_group.rank, model.tp_size


def test_ranks_that_srun_started(pool, cases) -> None:
    folder = cases(9, 3).folder
    assert pool.run(2, ranks_of_srun, folder, True) == [(0, 2), (1, 2)]
    with pytest.raises(WorkerError) as caught:
        pool.run(2, ranks_of_srun, folder, False)
    assert len(caught.value.errors) == 2
    for error in caught.value.errors.values():
        assert error.startswith("MeshError: ranks of srun: got no MASTER_ADDR and no MASTER_PORT in the environment")
