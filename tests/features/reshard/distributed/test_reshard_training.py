"""Training that goes on on other ranks: the losses and the weights of one process that did all steps."""

import gc
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from tests.features.reshard.distributed.test_reshard import MAKERS, in_float64, mesh_of
from tests.support.comparisons import full_parameters, relative, relative_errors, worst
from tests.support.models import load, save_as_loaded
from tests.support.tiers import wide
from tp_transformers import TensorParallelError, UnsupportedError
from tp_transformers.features.reshard.moves import Moves
from tp_transformers.ranks.mesh import join
from tp_transformers.training import reshard

TOLERANCE = 1e-9  # float64: the order of the sums, through the square roots of Adam
STEPS = (3, 2, 4, (2, 1, 1))


def groups(model: Any) -> list[dict[str, Any]]:
    """Two groups with settings of their own."""
    norms = [param for name, param in model.named_parameters() if "norm" in name]
    others = [param for name, param in model.named_parameters() if "norm" not in name]
    return [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0, "lr": 3e-3}]


def steps(model: Any, optimizer: Any, first: int) -> list[float]:
    """Two steps of training."""
    losses = []
    for index in range(first, first + 2):
        ids = torch.randint(2, 60, (2, 6), generator=torch.Generator().manual_seed(index))
        with in_float64():
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(folder: str, reference: str) -> list[Any]:
    """Run on every rank: two steps on each number of ranks."""
    join()
    expected = torch.load(reference)
    model = optimizer = scheduler = None
    if dist.get_rank() < STEPS[0]:
        model = load(folder, dtype=torch.float64, device_mesh=mesh_of(STEPS[0]))
        optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    else:
        mesh_of(STEPS[0])
    found = []
    for index, to in enumerate(STEPS):
        if index:
            before = optimizer
            model, optimizer = reshard(model, optimizer, to)
            assert before is None or optimizer is None or optimizer is before
        if model is not None:
            losses = steps(model, optimizer, 2 * index)
            found.append((to, relative(torch.tensor(losses), torch.tensor(expected["losses"][index]))))
    assert scheduler is None or scheduler.optimizer is not None
    if model is None:
        return found
    moments = {id(param): state for param, state in optimizer.state.items()}
    named = dict(model.named_parameters())
    for name, param in named.items():
        assert type(moments[id(param)]["exp_avg"]) is type(torch.zeros_like(param)), name
    return [*found, ("weights", worst(relative_errors(full_parameters(model), expected["weights"]))[1])]


@pytest.mark.parametrize("name", wide(["llama 9/3", "tied", "mixtral", "phi3"], 1))
def test_training_goes_on_as_if_nothing_had_happened(pool, tmp_path, name) -> None:
    save_as_loaded(MAKERS[name](), tmp_path)
    folder, reference = str(tmp_path / "checkpoint"), str(tmp_path / "reference.pt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    losses = [steps(model, optimizer, 2 * index) for index in range(len(STEPS))]
    torch.save({"losses": losses, "weights": full_parameters(model)}, reference)
    for rank, found in enumerate(pool.run(4, train, folder, reference)):
        print(name, rank, found)
        assert all(error < TOLERANCE for _, error in found)


def refused(folder: str) -> tuple[str, list[int]]:
    """Run on every rank: the error of a state that cannot be moved; states that are alive after each round of moves."""
    join()
    mesh, model, optimizer = mesh_of(2), None, None
    if dist.get_rank() < 2:
        model = load(folder, dtype=torch.float64, device_mesh=mesh)
        optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
        steps(model, optimizer, 0)
        next(iter(optimizer.state.values()))["odd"] = torch.zeros(3)
    with pytest.raises(UnsupportedError) as raised:
        reshard(model, optimizer, 3)
    message = str(raised.value)
    del raised  # its frames hold states
    if optimizer is not None:
        del next(iter(optimizer.state.values()))["odd"]
    with pytest.raises(TensorParallelError):
        reshard(model, optimizer, DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",)))
    if optimizer is not None:
        steps(model, optimizer, 2)
    gc.collect()
    states = [ref(state["exp_avg"]) for state in optimizer.state.values()] if optimizer is not None else []
    alive, move = [], Moves.round

    def count(moves: Moves, requests: Any) -> None:
        move(moves, requests)
        alive.append(sum(state() is not None for state in states))

    with mock.patch.object(Moves, "round", count):
        reshard(model, optimizer, 3)
    return message, alive


def test_an_error_keeps_the_optimizer_whose_states_are_freed_one_by_one(pool, cases) -> None:
    results = pool.run(3, refused, cases(9, 3).folder)
    assert len({message for message, _ in results}) == 1
    for _, alive in results[:2]:
        assert alive[0] == len(set(alive)) - 1 > 20
        assert alive[-1] == 0
