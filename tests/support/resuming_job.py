"""Training that saves after each step, and resumes from the last save: `torchrun --max-restarts 3 -m`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tp_transformers
from tests.support.machine_job import say, step
from tests.support.models import load

RATE = 1e-3


def main(folder: str, saves: Path, options: dict[str, Any]) -> None:
    """Train the model in `folder` for options["steps"], and print the loss of each.

    `options`: "pause", seconds before each step; "kill", (rank, step) of a rank that ends itself in the first run.
    """
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    first = resume(model, optimizer, saves)
    run, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
    say(f"RESUMED {rank} {dist.get_world_size()} {first}")
    for number in range(first, options["steps"]):
        time.sleep(options.get("pause", 0.0))
        if [rank, number, run] == [*options.get("kill", (None, None)), 0]:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = step(model, optimizer)
        dcp.state_dict_saver.save(state_of(model, optimizer), checkpoint_id=saves / f"step-{number + 1}")
        if rank == 0:
            say(f"LOSS {number} {loss!r}")
    say(f"DONE {rank}")


def resume(model: Any, optimizer: torch.optim.Optimizer, saves: Path) -> int:
    """Load the last complete save of any number of ranks. Returns how many steps it has."""
    done = [int(path.parent.name.removeprefix("step-")) for path in saves.glob("step-*/.metadata")]
    steps = int(max(model.tp_group.gather(max(done, default=0))))
    if steps:
        state = state_of(model, optimizer)
        tp_transformers.checkpoint.load_distributed_checkpoint(state, saves / f"step-{steps}")
        tp_transformers.training.load_optimizer_state_dict(model, optimizer, state["optimizer"])
    return steps


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a save has."""
    return {
        "model": model.state_dict(),
        "optimizer": tp_transformers.training.optimizer_state_dict(model, optimizer),
    }


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
    except tp_transformers.TensorParallelError as error:
        say(f"RAISED {time.time():.1f} {type(error).__name__}: {error}")
        raise
