"""Ranks with other inputs, or other calls, than their peers: one error on all of them within seconds, not a wait."""

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.models import PROMPTS, load
from tests.support.tiers import wide
from tp_transformers import MeshError

SECONDS = 8.0
"""Most seconds until all ranks raise; less than the time after which a rank reports that it waits."""


def tokens(*shape: int) -> torch.Tensor:
    return torch.full(shape, 5)


def autocast(model: Any, rank: int) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
        model(PROMPTS)


def one_skips(model: Any, rank: int) -> None:
    """Rank 1 leaves out the sum of a block, whose shape is that of all other sums."""
    if rank == 1:
        model.model.layers[0].mlp.forward = lambda x: x
    for _ in range(2):
        model.model(PROMPTS)


def one_learns(model: Any, rank: int) -> None:
    """Rank 0 sums gradients of the shape of the activations that rank 1 sums."""
    for _ in range(2):
        with torch.set_grad_enabled(rank == 0):
            loss = model(PROMPTS, labels=PROMPTS).loss
        if rank == 0:
            loss.backward()


def another_loop(model: Any, rank: int) -> None:
    """Rank 1 has fewer batches, and saves while others compute."""
    for _ in range(3 - (rank == 1)):
        model(PROMPTS)
    if rank == 1:
        model.tp_group.gather("saved")


def another_call(model: Any, rank: int) -> None:
    if rank == 1:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
    else:
        model(PROMPTS)


CALLS: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "sizes": (lambda model, rank: model(input_ids=tokens(2 + rank, 6)), "input_ids int64 (3, 6)"),
    "lengths": (lambda model, rank: model(tokens(2, 6 + rank), labels=tokens(2, 6 + rank)), "labels int64 (2, 7)"),
    "as many": (lambda model, rank: model(tokens(2 + 2 * rank, 6 - 3 * rank)), "(4, 3)"),
    "autocast": (autocast, "bfloat16"),
    "backward": (lambda model, rank: model(tokens(2, 6 + rank), labels=tokens(2, 6 + rank)).loss.backward(), "(2, 7)"),
    "generate": (lambda model, rank: model.generate(tokens(2, 6 + rank), max_new_tokens=2), "generate's inputs"),
    "one skips": (one_skips, "forward"),
    "one learns": (one_learns, "in backward"),
    "another call": (another_call, "a vote in save_pretrained"),
    "another loop": (another_loop, "forward"),
}


def call(folder: str, name: str, transport: str = "memory") -> None:
    """Run on every rank: a call that raises MeshError, and goes on with inputs that are the same."""
    os.environ["TP_TRANSFORMERS_SHARED_MEMORY"] = "0" if transport == "gloo" else "1"
    model = load(folder)
    expected = model(PROMPTS).logits
    began = time.monotonic()
    try:
        CALLS[name][0](model, model.tp_group.rank)
    except MeshError:
        assert time.monotonic() - began < SECONDS
        if name != "one skips":
            assert torch.equal(model(PROMPTS).logits, expected)
        raise
    finally:
        del os.environ["TP_TRANSFORMERS_SHARED_MEMORY"]


@pytest.mark.parametrize("size", wide([2, 3], 1))
@pytest.mark.parametrize("name", CALLS)
def test_ranks_out_of_step_raise(pool, cases, size, name) -> None:
    error = pool.error(size, call, cases(9, 3).folder, name, timeout=30)
    assert error.startswith("MeshError: ")
    assert CALLS[name][1] in error


@pytest.mark.parametrize("name", wide(["sizes", "lengths", "as many", "autocast", "generate"], 1))
def test_without_shared_memory(pool, cases, name) -> None:
    error = pool.error(2, call, cases(9, 3).folder, name, "gloo", timeout=60)
    assert error.startswith("MeshError: ")
    assert CALLS[name][1].removeprefix("bfloat16") in error
