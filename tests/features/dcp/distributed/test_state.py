"""Torch's distributed checkpoints: read on other numbers of ranks, or refused on all if they would run code on one."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.features.dcp.unit.test_distributed import Program, with_metadata
from tests.support.comparisons import different_tensors, full_parameters
from tests.support.models import MASK, PROMPTS, load
from tests.support.needs import needs
from tests.support.pool import WorkerError
from tp_transformers.checkpoint import load_distributed_checkpoint


def train_and_save(folder: str, target: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Two steps, then a distributed checkpoint of model and optimizer; returns both whole."""
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(PROMPTS, attention_mask=MASK, labels=PROMPTS).loss.backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": tp_transformers.training.optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=target)
    weights = full_parameters(model)
    moments = {
        name: tp_transformers.full_tensor(param, optimizer.state[param]["exp_avg_sq"])
        for name, param in model.named_parameters()
    }
    return weights, moments


def load_saved(folder: str, target: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], Any]:
    """A fresh model and optimizer, which take what was saved; returns both whole, and the loss of another step."""
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model.state_dict(), "optimizer": tp_transformers.training.optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=target)
    model.load_state_dict(state["model"])
    tp_transformers.training.load_optimizer_state_dict(model, optimizer, state["optimizer"])
    weights = full_parameters(model)
    moments = {
        name: tp_transformers.full_tensor(param, optimizer.state[param]["exp_avg_sq"])
        for name, param in model.named_parameters()
    }
    model(PROMPTS, attention_mask=MASK, labels=PROMPTS).loss.backward()
    optimizer.step()
    return weights, moments, model(PROMPTS, attention_mask=MASK, labels=PROMPTS).loss.item()


@needs("full_parameters")
@pytest.mark.parametrize("tied", [False, True])
def test_distributed_checkpoints_at_any_size(pool, cases, tmp_path, tied) -> None:
    heads, sizes = (((9, 3), (2, 3)), ((8, 2), (3, 2)))[tied]
    folder, target = cases(*heads, tie_word_embeddings=tied).folder, str(tmp_path / str(heads))
    (saved, moments), *others = pool.run(sizes[0], train_and_save, folder, target)
    for weights, _ in others:  # what several ranks hold may be written by any of them
        assert different_tensors(weights, saved) == []
    losses = set()
    for size in (sizes[1], 1):
        for weights, loaded, loss in pool.run(size, load_saved, folder, target):
            assert different_tensors(weights, saved) == [], (heads, size)
            assert different_tensors(loaded, moments) == []
            losses.add(round(loss, 3))
    assert len(losses) == 1
    # A model without a plan takes the same checkpoint.
    plain = AutoModelForCausalLM.from_pretrained(folder)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=target, no_dist=True)
    assert all(torch.equal(value, state["model"][name]) for name, value in saved.items())


def read(folders: list[str]) -> float:
    dist.init_process_group("gloo")
    state = {"weight": torch.zeros(3)}
    load_distributed_checkpoint(state, folders[int(os.environ["RANK"])])
    return state["weight"].sum().item()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_rank_with_code_stops_all(pool, tmp_path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=good)
    shutil.copytree(good, bad)
    with_metadata(bad, lambda metadata: setattr(metadata, "planner_data", Program(tmp_path / "ran")))
    assert pool.run(2, read, [str(good)] * 2) == [3.0, 3.0]
    with pytest.raises(WorkerError) as caught:
        pool.run(2, read, [str(good), str(bad)], timeout=60)
    kinds = {error.split(":")[0] for error in caught.value.errors.values()}
    assert kinds == {"CheckpointError"}
    assert len(set(caught.value.errors.values())) == 1
    assert not (tmp_path / "ran").exists()
