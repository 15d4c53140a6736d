"""Ranks and devices from the variables of launchers, with a stand-in for GPUs."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tp_transformers import MeshError
from tp_transformers.ranks import environment
from tp_transformers.ranks.environment import LAUNCHERS, launcher, local_device, local_rank, local_size, rendezvous

VARIABLES = [name for each in LAUNCHERS for name in vars(each).values() if name is not None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node with 4 GPUs, the first of which is current, and nothing in the environment."""
    for name in (*VARIABLES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    state = SimpleNamespace(count=4, current=0)
    module = SimpleNamespace(device_count=lambda: state.count, current_device=lambda: state.current)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    return state


def told(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


SRUN = {"SLURM_PROCID": 6, "SLURM_STEP_NUM_TASKS": 8, "SLURM_LOCALID": 2}
PLACES = [
    ({"RANK": 6, "WORLD_SIZE": 8, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4}, 4),
    (SRUN, None),
    (
        {
            "OMPI_COMM_WORLD_RANK": 6,
            "OMPI_COMM_WORLD_SIZE": 8,
            "OMPI_COMM_WORLD_LOCAL_RANK": 2,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 4,
        },
        4,
    ),
    ({"PMI_RANK": 6, "PMI_SIZE": 8, "MPI_LOCALRANKID": 2, "MPI_LOCALNRANKS": 4}, 4),
    ({"PMI_RANK": 6, "PMI_SIZE": 8, "PMI_LOCAL_RANK": 2, "PMI_LOCAL_SIZE": 4}, 4),
    ({"RANK": 6, "WORLD_SIZE": 8, "SLURM_PROCID": 6, "SLURM_LOCALID": 2}, None),  # exported by a script for srun
    (
        {**SRUN, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "RANK": 6, "WORLD_SIZE": 8, "LOCAL_RANK": 2},
        None,
    ),  # srun torchrun
]


@pytest.mark.parametrize(("variables", "on_node"), PLACES)
def test_every_launcher_tells_rank_device_and_size(gpus, monkeypatch, variables, on_node) -> None:
    told(monkeypatch, **variables)
    assert local_rank(6) == 2
    assert local_size() == on_node
    assert local_device("cuda") == torch.device("cuda", 2)
    with pytest.raises(MeshError, match="no MASTER_ADDR and no MASTER_PORT in the environment"):
        rendezvous()
    told(monkeypatch, MASTER_ADDR="host", MASTER_PORT=29500)
    assert rendezvous() == {"rank": 6, "world_size": 8}


def test_one_visible_gpu_a_rank(gpus, monkeypatch) -> None:
    gpus.count = 1
    told(monkeypatch, **SRUN)
    assert local_device("cuda") == torch.device("cuda", 0)


def test_more_ranks_than_gpus(gpus, monkeypatch) -> None:
    gpus.count = 2
    told(monkeypatch, **SRUN)
    with pytest.raises(MeshError, match="local rank 2 on a node with 2 cuda devices"):
        local_device("cuda")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_PROCID": 0, "SLURM_NTASKS": 8, "SLURM_LOCALID": 0},  # a batch script, which is one process
        {"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 1, "SLURM_LOCALID": 0},  # a shell by srun --pty
        {"PMI_RANK": 0, "PMI_SIZE": 1},
    ],
)
def test_a_process_by_itself(gpus, monkeypatch, variables) -> None:
    told(monkeypatch, **variables)
    assert launcher() is None


def test_a_process_by_itself_takes_the_current_gpu(gpus) -> None:
    gpus.current = 3
    assert local_device("cuda") == torch.device("cuda", 3)


@pytest.mark.parametrize(("rank", "said"), [(0, 1), (6, 0)])
def test_gpus_by_turns_where_no_launcher_tells(gpus, monkeypatch, caplog, rank, said) -> None:
    told(monkeypatch, RANK=rank, WORLD_SIZE=8, SLURM_PROCID=rank + 1, SLURM_LOCALID=3)  # of another process
    with caplog.at_level(logging.WARNING):
        assert local_device("cuda") == torch.device("cuda", rank % 4)
    assert len(caplog.records) == said
    assert all("export LOCAL_RANK" in record.getMessage() for record in caplog.records)
    gpus.current = 3  # chosen by the script
    assert local_device("cuda") == torch.device("cuda", 3)


def test_a_running_group_tells_the_device_that_it_is_bound_to(gpus, monkeypatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    bound = SimpleNamespace(bound_device_id=torch.device("cuda", 0))
    monkeypatch.setattr(environment.dist, "group", SimpleNamespace(WORLD=bound))
    assert local_device("cuda") == torch.device("cuda", 0)
