"""The batch, tolerances and Trainer of the tests of training."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.comparisons import read_folder, relative, relative_errors
from tests.support.models import VOCAB, load

BATCH = torch.randint(3, VOCAB, (4, 9), generator=torch.Generator().manual_seed(3))
MAX_NORM = 0.5
"""Far below the norm of the gradients, so that every step is clipped."""

# fp32 sums in another order, through a few steps.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-4


def mesh_of(copies: int) -> DeviceMesh:
    """A mesh of `copies` along "dp", each of which has all ranks along "tp"."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("dp", "tp"))


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return len(BATCH)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": BATCH[index], "labels": BATCH[index]}


@contextmanager
def quietly() -> Iterator[None]:
    """Within the block, nothing below an error is logged."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def be_alone() -> None:
    """For accelerate, torchrun's environment makes one process a distributed one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)


def model_of(folder: str, copies: int, mode: Any = "shard", **options: Any) -> Any:
    """The model of `copies`, or of one process for 0."""
    if not copies:
        be_alone()
        return AutoModelForCausalLM.from_pretrained(folder)
    mesh = mesh_of(copies)
    model = load(folder, device_mesh=mesh, **options)
    return tp_transformers.data_parallel(model, mesh, mode=mode) if copies > 1 else model


def arguments_of(folder: str, **settings: Any) -> Any:
    """TrainingArguments of steps that are clipped and logged; a large epsilon, that rounding may not decide."""
    from transformers import TrainingArguments

    usual = {"learning_rate": 1e-2, "adam_epsilon": 1e-2, "max_grad_norm": MAX_NORM, "logging_steps": 1}
    return TrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True, **(usual | settings))


@quietly()
def with_trainer(
    folder: str,
    saved: str,
    copies: int,
    adapted: bool = False,
    loss: bool = False,
    fp16: bool = False,
    own: bool = True,
    config: Any = None,
) -> dict[str, Any]:
    """Train on batches of two in all, evaluate, save; `copies`: of the model, which has two ranks each; 0 for one
    process. `adapted`: train LoRA alone; `loss`: with logits that are cut; `fp16`: with a scaler that begins too high;
    `own`: with our Trainer, else with transformers'. `config`: a DistributedConfig in place of a mesh.
    """
    from transformers import Trainer

    if own:
        from tp_transformers.trainer import Trainer

    options = {"tp_loss_parallel": loss} if config is None else {"tp_plan": None, "distributed_config": config}
    model = model_of(folder, copies, **options) if config is None else load(folder, **options)
    if adapted:
        torch.manual_seed(1)
        targets = ["q_proj", "o_proj", "up_proj", "lm_head"]
        model = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights="gaussian"))
    trainer = Trainer(
        model=model,
        args=arguments_of(
            saved,
            per_device_train_batch_size=2 // max(copies, 1),
            per_device_eval_batch_size=2 if copies > 1 else 3,  # of four
            max_steps=3,
            save_strategy="no",
            fp16=fp16,
        ),
        train_dataset=Texts(),
        eval_dataset=Texts(),
        compute_metrics=lambda given: {"answers": (given.predictions.argmax(-1) * given.label_ids).sum()},
    )
    if fp16:  # accelerate makes no scaler on a CPU, and does what it does on a GPU where there is one
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=2.0**-20)
    if config is not None:
        tp_transformers.training.ExpertLoad(model)
    trainer.train()
    trainer.save_model()
    seen = trainer.evaluate()
    predicted = trainer.predict(Texts())
    assert (predicted.label_ids == BATCH.numpy()).all()
    reloaded = 0.0
    if adapted:
        base = load(folder, **options) if copies else AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits = PeftModel.from_pretrained(base, saved).eval()(BATCH).logits
        reloaded = relative(logits, torch.from_numpy(predicted.predictions))
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert config is None or all(entry["expert_imbalance_max"] >= 1 for entry in history)
    return {
        "losses": torch.tensor([entry["loss"] for entry in history]),
        "norms": torch.tensor([float(entry["grad_norm"]) for entry in history]),
        "evaluated": torch.tensor([seen["eval_loss"]]),
        "predicted": torch.from_numpy(predicted.predictions),
        "answers": seen["eval_answers"],
        "reloaded": reloaded,
        "scale": trainer.accelerator.scaler.get_scale() if fp16 else None,
    }


def assert_trained_alike(results: list[dict[str, Any]], expected: dict[str, Any], one: str, saved: str) -> None:
    """What `with_trainer` returns of ranks is that of one process; so are the weights saved in two folders."""
    for found in results:
        assert len(found["losses"]) == 3
        assert relative(found["losses"], expected["losses"]) < LOSS_TOLERANCE
        assert relative(found["norms"], expected["norms"]) < NORM_TOLERANCE
        assert relative(found["evaluated"], expected["evaluated"]) < LOSS_TOLERANCE
        assert relative(found["predicted"], expected["predicted"]) < WEIGHT_TOLERANCE
        assert found["answers"] == expected["answers"]
        assert found["reloaded"] < WEIGHT_TOLERANCE
    assert max(relative_errors(read_folder(saved), read_folder(one)).values()) < WEIGHT_TOLERANCE
