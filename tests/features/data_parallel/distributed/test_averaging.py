"""Gradients of data-parallel copies, which are averaged while the backward goes on, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tp_transformers
from tests.support.comparisons import gradient_differences
from tests.support.models import PROMPTS, load_both
from tests.support.on_ranks import on_ranks
from tests.support.training import mesh_of
from tp_transformers.features.data_parallel import averaging


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


@on_ranks(4)
def test_gradients_are_averaged_during_a_backward(folder) -> None:
    """Gradients of every kind of step, and what was sent before the step ended."""
    averaging.BUCKET, averaging.TRAVELLING = 20_000, 2
    mesh = mesh_of(2)
    model, one_process = (each.train() for each in load_both(folder, device_mesh=mesh))
    tp_transformers.data_parallel(model, mesh)
    copy, axis = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
    texts = PROMPTS.chunk(2)

    def loss(of: Any, text: Tensor) -> Tensor:
        return of(text, labels=text).loss

    def hold(step: str) -> None:
        errors = gradient_differences(model, one_process)
        assert max(errors.values()) < 1e-5, (step, errors)
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
        early = events[: events.index("last gradient")].count("sent")
        # At first, the copies do not know which parameters are used.
        assert early == 0 if name == "the first" else early > 1
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
