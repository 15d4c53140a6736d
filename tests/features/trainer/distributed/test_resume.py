"""Training that goes on where it was left, on the same ranks, on others and in one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.features.data_parallel.distributed.test_training_modes import MODES, start
from tests.support.models import with_shares
from tests.support.tiers import wide
from tests.support.training import BATCH, MAX_NORM, arguments_of, model_of, quietly

ROUNDING = 1e-6
"""Of losses in fp32, on another mesh."""


class Run:
    """A model in training, with what trains it."""

    def __init__(self, folder: str, mode: str | None) -> None:
        if mode is None:
            self.model, self.batch = AutoModelForCausalLM.from_pretrained(folder).train(), BATCH
        else:
            self.model, self.batch = start(folder, MODES[mode])
        # A large epsilon: steps that go by the sign of a gradient alone would show rounding.
        self.optimizer = torch.optim.AdamW(tp_transformers.training.parameter_groups(self.model), lr=1e-2, eps=1e-2)

    def train(self, rates: list[float]) -> list[float]:
        """The losses of a step at each of these learning rates, over all copies."""
        losses = []
        for rate in rates:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * rate
            self.optimizer.zero_grad()
            loss = self.model(self.batch, labels=self.batch).loss
            loss.backward()
            tp_transformers.clip_grad_norm_(self.model, MAX_NORM)
            self.optimizer.step()
            if dist.is_initialized():
                dist.all_reduce(loss := loss.detach() / dist.get_world_size())
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": tp_transformers.training.optimizer_state_dict(self.model, self.optimizer),
        }


def leave(folder: str, mode: str, target: str) -> list[float]:
    """Run on every rank: three steps, a checkpoint, and the losses of three more."""
    run = Run(folder, mode)
    run.train([1, 0.8, 0.8])
    dcp.save(run.state(), checkpoint_id=target)
    return run.train([0.8, 0.8, 0.8])


def resume(folder: str, mode: str | None, target: str) -> list[float]:
    """Run on every rank: the losses of three steps from the checkpoint."""
    run = Run(folder, mode)
    state = run.state()
    dcp.load(state, checkpoint_id=target, no_dist=mode is None)
    run.model.load_state_dict(state["model"])
    tp_transformers.training.load_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
    return run.train([0.8, 0.8, 0.8])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shard", "replicate"])
def test_a_distributed_checkpoint_goes_on_anywhere(pool, cases, tmp_path, mode) -> None:
    folder, target = cases(9, 3).folder, str(tmp_path)
    expected, *_ = pool.run(4, leave, folder, mode, target)
    for losses in pool.run(4, resume, folder, mode, target):
        assert losses == expected, "on the same ranks, to the bit"
    for other, size in (("tp", 3), (None, 1)):
        for losses in pool.run(size, resume, folder, other, target):
            assert losses == pytest.approx(expected, rel=ROUNDING)
    for losses in pool.run(3, with_shares, "5,1,3", resume, folder, "tp", target):
        assert losses == pytest.approx(expected, rel=ROUNDING)


# -- transformers' Trainer


def only_lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"]))


def only_norms(model: Any) -> Any:
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    return model


def without_norms(model: Any) -> Any:
    for name, param in model.named_parameters():
        param.requires_grad_("norm" not in name)
    return model


def with_an_unused_layer(model: Any) -> Any:
    """The model with a layer that never gets a gradient, as a vision tower in training on texts."""
    model.unused = torch.nn.Linear(3, 3)
    return model


@quietly()
def with_trainer(
    folder: str, target: str, copies: int, resumed: str | None, change: Any = None, **settings: Any
) -> dict[str, Any]:
    """Run on every rank: what Trainer logs of every step; `copies`: of the model, or 0 for one process.

    change: called with the model before Trainer is made; returns the model to train.
    settings: other TrainingArguments.
    """
    from tp_transformers.trainer import Trainer

    torch.manual_seed(int(os.environ["RANK"]))  # a new process' random state
    model = model_of(folder, copies)
    if change is not None:
        torch.manual_seed(1)  # the same values on all ranks and in all runs
        model = change(model)
    arguments = arguments_of(
        target,
        per_device_train_batch_size=2 // max(copies, 1),
        gradient_accumulation_steps=2,
        max_steps=4,
        save_steps=2,
        save_strategy="no" if resumed else "steps",
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        **settings,
    )
    data = [{"input_ids": row, "labels": row} for row in BATCH]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=resumed)
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "logged": [[float(entry[key]) for key in ("loss", "grad_norm", "learning_rate")] for entry in history],
        "random": torch.get_rng_state(),
    }


PARTS = wide(
    [
        (None, ((3, 1), (4, 2), (1, 0))),
        (only_lora, ((3, 1),)),
        (only_lora, ((1, 0),)),
        *((change, ((3, 1), (1, 0))) for change in (only_norms, with_an_unused_layer, without_norms)),
    ],
    2,
)
"""(change of the model, (ranks, copies) on which it goes on)."""


@pytest.mark.parametrize(("change", "others"), PARTS)
def test_a_checkpoint_of_trainer_goes_on_anywhere(pool, cases, tmp_path, change, others) -> None:
    """Also where a group of the optimizer is empty, or a parameter has no state, as it got no gradient."""
    folder, target = cases(9, 3).folder, str(tmp_path / "cut")
    (one,) = pool.run(1, with_trainer, folder, str(tmp_path / "one"), 0, None, change)
    left, _ = pool.run(2, with_trainer, folder, target, 1, None, change)
    assert len(one["logged"]) == 4
    half = f"{target}/checkpoint-2"
    for result in pool.run(2, with_trainer, folder, str(tmp_path / "same"), 1, half, change):
        assert result["logged"] == left["logged"], "on the same ranks, to the bit"
    for size, copies in others:
        results = pool.run(size, with_trainer, folder, str(tmp_path / "other"), copies, half, change)
        for result in [left, *results]:
            for mine, theirs in zip(result["logged"], one["logged"], strict=True):
                assert mine == pytest.approx(theirs, rel=ROUNDING)
        if size == 3:  # the third has no file of its own
            assert all(torch.equal(result["random"], results[0]["random"]) for result in results)
    if change is None:
        error = pool.error(2, with_trainer, folder, target, 1, str(tmp_path / "one" / "checkpoint-2"))
        assert "got optimizer.pt, the state of an optimizer of one process" in error
