"""The model to train: plain in one process, tensor- and data-parallel on ranks; and its checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM

import tp_transformers
from tp_transformers.errors import UsageError
from tp_transformers.ranks.group import TensorParallelGroup


def load(arguments: argparse.Namespace, world: TensorParallelGroup) -> Any:
    """Load the model in fp32 and prepare it for training: plain without torchrun, else parallel by the arguments."""
    if world.process_group is None:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(world.device)
    else:
        wanted = ("sequence_parallel", "loss_parallel", "batch_sharded", "invariant")
        options = {f"tp_{name}": True for name in wanted if getattr(arguments, name)}
        mesh = init_device_mesh(world.device.type, (arguments.dp, arguments.tp), mesh_dim_names=("dp", "tp"))
        tp_transformers.enable()
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, tp_plan="auto", device_mesh=mesh, dtype=torch.float32, **options
        )
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    if arguments.fsdp:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": policy} if arguments.dtype == "bf16" else {}
        tp_transformers.data_parallel(model, mesh, mode="shard", **options)
    elif arguments.dp > 1 or arguments.batch_sharded:  # batch_sharded: averages the replicated parameters
        tp_transformers.data_parallel(model, mesh, mode="replicate")
    return model


def save(folder: Path, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Write a distributed checkpoint: model, optimizer and number of steps. Collective."""
    dcp.save(_state(step, model, optimizer), checkpoint_id=folder)


def resume(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint written on any number of ranks into model and optimizer; returns its number of steps."""
    state = _state(0, model, optimizer)
    tp_transformers.checkpoint.load_distributed_checkpoint(state, folder)
    tp_transformers.training.load_optimizer_state_dict(model, optimizer, state["optimizer"])
    return int(state["step"])


def latest(folder: Path) -> Path:
    """The checkpoint `folder`, or the latest one in it. Raises UsageError if there is none."""
    found = [path.parent for path in folder.glob("step-*/.metadata")]  # written last
    if (folder / ".metadata").is_file():
        found = [folder]
    if not found:
        raise UsageError(
            "--resume",
            got=f"{folder}, without a checkpoint",
            expected="the --out of a run that had --save-every, or a step-N in it",
            fix="Leave it out to begin.",
        )
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]) if path != folder else 0)


def _state(step: int, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": tp_transformers.training.optimizer_state_dict(model, optimizer),
        "step": step,
    }
