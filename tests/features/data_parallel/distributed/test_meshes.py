"""Meshes that a model is loaded over: those that are right, and one clear error each for those that are not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.comparisons import gradient_differences, relative
from tests.support.models import PROMPTS, load
from tests.support.pool import Pool, WorkerError
from tests.support.tiers import wide

pytestmark = pytest.mark.distributed


def interleaved(folder: str, mode: Any) -> tuple[list[int], float, float, float]:
    """Run on every rank: the ranks that share a model, and differences of its loss, norm and gradients."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model, one_process = load(folder, device_mesh=mesh).train(), AutoModelForCausalLM.from_pretrained(folder).train()
    tp_transformers.data_parallel(model, mesh, mode=mode)
    own = PROMPTS.chunk(2)[mesh["dp"].get_local_rank()]
    loss, expected = model(own, labels=own).loss, one_process(PROMPTS, labels=PROMPTS).loss
    loss.backward(), expected.backward()
    dist.all_reduce(mean := loss.detach() / dist.get_world_size())
    norm = torch.nn.utils.clip_grad_norm_(one_process.parameters(), 0.5)
    seen = tp_transformers.clip_grad_norm_(model, 0.5)
    grads = max(gradient_differences(model, one_process).values())
    return model.tp_group.global_ranks, relative(mean, expected.detach()), relative(seen, norm), grads


@pytest.mark.parametrize("mode", wide(["shard", "replicate"], 1))
def test_ranks_that_share_a_model_need_not_be_neighbours(pool: Pool, cases: Any, mode: str) -> None:
    results = pool.run(4, interleaved, cases(9, 3).folder, mode)
    assert [ranks for ranks, *_ in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for _, loss, norm, grads in results:
        assert loss < 1e-6
        assert norm < 1e-5
        assert grads < 1e-5  # fp32 sums in another order


AXES = ("dp", "tp")


def refused(folder: str) -> dict[str, str]:
    """Run on every rank: what is said of meshes that do not fit."""
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), {}
    right = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=AXES)
    model = load(folder, device_mesh=right)
    tries = {
        "descending": lambda: load(folder, device_mesh=DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=AXES)),
        "no tp": lambda: load(folder, device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))),
        "size": lambda: load(folder, device_mesh=right, tp_size=4),
        "size of one": lambda: load(folder, device_mesh=right, tp_size=3 if rank % 2 else None),
        "across": lambda: tp_transformers.data_parallel(
            model, DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=AXES)
        ),
        "mode of one": lambda: tp_transformers.data_parallel(model, right, mode="replicate" if rank else "ddp"),  # type: ignore[arg-type]
        "no mesh": lambda: load(folder, device_mesh=(2, 2)),
    }
    for name, attempt in tries.items():
        try:
            attempt()
        except tp_transformers.TensorParallelError as error:
            said[name] = f"{type(error).__name__}: {error}"
    few = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    if rank < 2:
        said["few"] = str(load(folder, device_mesh=few).tp_size)
    else:
        with pytest.raises(tp_transformers.MeshError) as caught:
            load(folder, device_mesh=few)
        said["few"] = str(caught.value)
    return said


def test_meshes_that_do_not_fit_are_one_error_on_all_ranks(pool: Pool, cases: Any) -> None:
    expected = {
        "descending": "device_mesh: got ranks [[0, 1], [3, 2]], expected ranks that ascend along every axis",
        "no tp": "device_mesh: got 2 axes named ('dp', 'pp'), expected one axis, or an axis named 'tp'",
        "size": "tp_size: got 4, expected 2",
        "size of one": "rank 1: tp_size: got 3, expected 2",
        "across": "data_parallel: got a mesh whose tp axis is ranks [0, 2], expected ranks [",
        "mode of one": "data_parallel: got mode='ddp'",
        "no mesh": "device_mesh: got (2, 2), expected a torch.distributed.device_mesh.DeviceMesh",
    }
    for rank, said in enumerate(pool.run(4, refused, cases(9, 3).folder)):
        few = said.pop("few")
        assert said.keys() == expected.keys()
        for name, text in expected.items():
            assert text in said[name], (rank, said[name])
        own = f"device_mesh: got one of ranks [0, 1] on rank {rank}, expected one that this rank is in"
        assert few == "2" if rank < 2 else few.startswith(own)


def ranks_of_srun(folder: str, address: bool) -> tuple[int, int]:
    """As srun starts a rank, which knows nothing of torchrun."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    saved = {name: os.environ.pop(name) for name in names}
    theirs = {"SLURM_PROCID": "RANK", "SLURM_STEP_NUM_TASKS": "WORLD_SIZE", "SLURM_LOCALID": "LOCAL_RANK"}
    os.environ.update({name: saved[ours] for name, ours in theirs.items()})
    try:
        if address:
            os.environ.update({name: saved[name] for name in ("MASTER_ADDR", "MASTER_PORT")})
        model = load(folder)
        return model.tp_group.rank, model.tp_size
    finally:
        for name in theirs:
            del os.environ[name]
        os.environ.update(saved)


def test_ranks_that_srun_started(pool: Pool, cases: Any) -> None:
    folder = cases(9, 3).folder
    assert pool.run(2, ranks_of_srun, folder, True) == [(0, 2), (1, 2)]
    with pytest.raises(WorkerError) as caught:
        pool.run(2, ranks_of_srun, folder, False)
    assert len(caught.value.errors) == 2
    for error in caught.value.errors.values():
        assert error.startswith("MeshError: ranks of srun: got no MASTER_ADDR and no MASTER_PORT in the environment")
