"""A name that a library lacks: the library is left alone, and a tensor-parallel model is refused where it needs it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import peft.utils.hotswap
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from transformers.generation.continuous_batching import continuous_api

import tp_transformers
from tests.support.models import load
from tests.support.needs import needs
from tp_transformers import UnsupportedError
from tp_transformers.logs import warn_once
from tp_transformers.patches import Patch
from tp_transformers.ranks.group import GROUP
from tp_transformers.seams import added
from tp_transformers.strategies import SHARD


def make_trainers(folder: str, scratch: str) -> None:
    """Runs in one process of the pool, which has no other models: trainers, where the Trainer has another method."""
    from transformers import Trainer, TrainingArguments

    from tp_transformers.features.trainer.trainer import Trainer as Ours

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tp_transformers").addHandler(handler)
    clip = Trainer._clip_grad_norm
    del Trainer._clip_grad_norm
    try:
        with tp_transformers.enable():
            assert ["no Trainer._clip_grad_norm" in each and "transformers 5" in each for each in said] == [True]
            arguments = TrainingArguments(output_dir=scratch, use_cpu=True, report_to=[])
            plain, model = (load(folder, tp_plan=plan) for plan in (None, "auto"))
            assert Trainer(plain, arguments).model is plain
            assert Trainer(model_init=lambda: plain, args=arguments).model is plain
            assert Ours(plain, arguments).model is plain
            for make in (Trainer, Ours):
                for given in ({"model": model}, {"model_init": lambda: model}):
                    with pytest.raises(UnsupportedError, match=r"no Trainer\._clip_grad_norm.*another release of t"):
                        make(args=arguments, **given)
            assert len(said) == 1, said
    finally:
        Trainer._clip_grad_norm = clip
        logging.getLogger("tp_transformers").removeHandler(handler)


@needs("trainer")
def test_a_renamed_method_of_trainer_refuses_tensor_parallel_models_alone(pool, cases, tmp_path) -> None:
    pool.run(1, make_trainers, cases(8, 4).folder, str(tmp_path))


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(3))])


def shard() -> nn.Parameter:
    """A parameter that says that it is a shard of two ranks."""
    param = nn.Parameter(torch.ones(3))
    group: Any = SimpleNamespace(size=2, process_group=object())
    SHARD.put(param, SimpleNamespace(group=group, resharded_over=None))  # type: ignore[arg-type]
    return param


def scale(params: list[nn.Parameter]) -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{"params": params}], step=lambda: None)
    scaler = GradScaler("cpu", enabled=False)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def swap(params: list[nn.Parameter]) -> None:
    model = nn.Module()
    if any(SHARD.find(param) for param in params):
        GROUP.put(model, SimpleNamespace())  # type: ignore[arg-type]
    peft.utils.hotswap.hotswap_adapter_from_state_dict(model, {}, "default", config=SimpleNamespace(target_modules=[]))


def batch(params: list[nn.Parameter]) -> None:
    model = nn.Module()
    if any(SHARD.find(param) for param in params):
        GROUP.put(model, SimpleNamespace())  # type: ignore[arg-type]
    try:
        continuous_api.ContinuousBatchingManager(model, None, None)
    except AttributeError:  # transformers itself, on a model without a config
        return


PATCHES = {patch.name: patch for patch in added("model_patches")}
CASES: dict[str, tuple[Any, str, Callable[[list[nn.Parameter]], Any]]] = {
    "GradScaler": (GradScaler, "_unscale_grads_", scale),
    "optimizers": (torch.optim.Optimizer, "profile_hook_step", torch.optim.SGD),
    "swaps of adapters": (peft.utils.hotswap, "_pad_lora_weights", swap),
    "continuous batching": (continuous_api.ContinuousBatchingManager, "_create_batch_processor", batch),
}
"""Name of a patch -> where it needs which name, and a use."""


@pytest.mark.parametrize("name", [name for name in CASES if name in PATCHES])
def test_the_place_of_use_refuses(name, monkeypatch, caplog) -> None:
    patch, (owner, missing, use) = PATCHES[name], CASES[name]
    gc.collect()  # models of earlier tests hold the patch
    assert not patch.is_on
    monkeypatch.setattr(patch, "missing", "")
    warn_once.cache_clear()
    use([nn.Parameter(torch.ones(3))])  # torch has put its hooks around steps
    monkeypatch.delattr(owner, missing)
    before = dict(vars(owner))
    with caplog.at_level(logging.WARNING, "tp_transformers"):
        undo = patch._make()
    try:
        assert missing in caplog.text
        use([nn.Parameter(torch.ones(3))])
        with pytest.raises(UnsupportedError, match=missing):
            use([shard()])
    finally:
        undo()
    assert dict(vars(owner)) == before


@needs("full_parameters")
def test_a_load_refuses_where_every_model_needs_the_name(monkeypatch) -> None:
    patch = Patch("safetensors", "save_file", PATCHES["save_file"]._install)
    for name in ("_to_ndarray", "_tobytes"):
        monkeypatch.delattr(safetensors.torch, name, raising=False)
    model = nn.Module()
    with pytest.raises(UnsupportedError, match=r"safetensors \d.*: no safetensors\.torch\._to_ndarray"):
        patch.hold_for(model)
    patch.hold()  # by somebody who has no such model
