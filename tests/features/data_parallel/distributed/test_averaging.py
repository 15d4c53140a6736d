"""Gradients of data-parallel copies, which are averaged while the backward goes on, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.comparisons import gradient_differences
from tests.support.models import PROMPTS, load
from tests.support.pool import Pool
from tp_transformers.features.data_parallel import averaging

pytestmark = pytest.mark.distributed


@contextmanager
def without_second_mlp(model: Any) -> Iterator[None]:
    """A model whose second MLP gives nothing, so that its parameters have no gradient."""
    mlp = model.model.layers[1].mlp
    handle = mlp.register_forward_pre_hook(lambda module, args: None)
    forward, mlp.forward = mlp.forward, torch.zeros_like
    try:
        yield
    finally:
        mlp.forward = forward
        handle.remove()


def one_layer_twice(model: Any) -> None:
    """Let one layer stand in the place of two, each computed again in the backward: its gradients come in two parts."""
    model.model.layers = nn.ModuleList([model.model.layers[0]] * 2)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def steps(folder: str) -> dict[str, Any]:
    """Run on every rank: the worst error of a gradient in every kind of step, and what was sent before it ended."""
    averaging.BUCKET, averaging.TRAVELLING = 20_000, 2
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, one_process = load(folder, device_mesh=mesh).train(), AutoModelForCausalLM.from_pretrained(folder).train()
    tp_transformers.data_parallel(model, mesh)
    copy, axis = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
    texts = PROMPTS.chunk(2)
    found: dict[str, Any] = {}

    def loss(of: Any, text: Tensor) -> Tensor:
        return of(text, labels=text).loss

    def hold(name: str) -> None:
        found[name] = max(gradient_differences(model, one_process).values())
        model.zero_grad(), one_process.zero_grad()

    def whole() -> None:
        (sum(loss(one_process, text) for text in texts) / 2).backward()

    for name in ("the first", "the second"):
        events: list[str] = []
        all_reduce = dist.all_reduce

        def watched(
            tensor: Tensor, *args: Any, all_reduce: Any = all_reduce, events: Any = events, **kwargs: Any
        ) -> Any:
            events.append("sent" if kwargs.get("group") is axis else "other")
            return all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = watched
        handle = model.model.embed_tokens.weight.register_hook(
            lambda grad, events=events: events.append("last gradient")
        )
        loss(model, texts[copy]).backward()
        dist.all_reduce = all_reduce
        handle.remove()
        found[f"sent early, {name}"] = events[: events.index("last gradient")].count("sent")
        whole()
        hold(name)

    model.set_requires_gradient_sync(False)
    loss(model, texts[copy]).backward()
    model.set_requires_gradient_sync(True)
    loss(model, texts[copy]).backward()
    whole(), whole()
    hold("added up")

    if copy == 1:
        with without_second_mlp(model):
            loss(model, texts[copy]).backward()
    else:
        loss(model, texts[copy]).backward()
    (loss(one_process, texts[0]) / 2).backward()
    with without_second_mlp(one_process):
        (loss(one_process, texts[1]) / 2).backward()
    hold("unused on one copy")

    with without_second_mlp(model):
        loss(model, texts[copy]).backward()
    with without_second_mlp(one_process):
        whole()
    hold("unused on all")

    loss(model, texts[copy]).backward()
    model.zero_grad()
    for each in (model, one_process):
        one_layer_twice(each)
    for name in ("in parts", "in parts again"):
        loss(model, texts[copy]).backward()
        whole()
        hold(name)
    return found


def test_gradients_are_averaged_during_a_backward(pool: Pool, cases: Any) -> None:
    for found in pool.run(4, steps, cases(9, 3).folder):
        assert found.pop("sent early, the first") == 0, "the copies do not know yet which parameters are used"
        assert found.pop("sent early, the second") > 1
        assert {name: error for name, error in found.items() if error > 1e-5} == {}
