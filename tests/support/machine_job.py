"""What the ranks of several machines run, and leave in files: `torchrun -m tests.support.machine_job`."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

import tp_transformers
from tests.support.comparisons import full_gradients
from tests.support.models import PROMPTS, load, observe
from tp_transformers.ranks.shared_memory.joining import memory_of


def main(folder: str, results: str, options: dict[str, Any]) -> None:
    """Load the model in `folder`, save to `results`/rank.pt what it computes.

    `options`: "load", arguments of the load; "config", those of a DistributedConfig in place of a plan; "steps" of SGD;
    "release", (machine, library, its release there).
    """
    arguments = options.get("load", {})
    machine, library, release = options.get("release", ("", "", ""))
    if machine == socket.gethostname():
        vars(sys.modules[library])["__version__"] = release
    if "config" in options:
        config = DistributedConfig(**options["config"])
        model = load(folder, tp_plan=None, distributed_config=config, **arguments)
    else:
        model = load(folder, **arguments)
    seen = observe(model)
    seen["grads"] = full_gradients(model)
    seen["losses"] = train(model, options.get("steps", 0))
    seen["machine"], seen["rank"] = socket.gethostname(), model.tp_group.rank
    seen["transport"] = type(memory_of(model.tp_group.process_group)).__name__
    torch.save(seen, Path(results, f"{dist.get_rank()}.pt"))


def train(model: Any, steps: int) -> list[float]:
    """The losses of some steps of SGD on one batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(PROMPTS, labels=PROMPTS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
    except tp_transformers.TensorParallelError as error:
        line = f"RAISED {dist.get_rank() if dist.is_initialized() else '?'} {type(error).__name__}: {error}"
        sys.stdout.write(line.replace("\n", " ") + "\n")
        sys.stdout.flush()
        raise
