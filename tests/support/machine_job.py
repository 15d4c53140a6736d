"""What the ranks of several machines run, and leave in files: `torchrun -m tests.support.machine_job`."""

from __future__ import annotations

import importlib
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

import tp_transformers
from tests.support.comparisons import full_gradients
from tests.support.models import PROMPTS, load, observe
from tp_transformers.ranks.direct import transport_of


def main(folder: str, results: str, options: dict[str, Any]) -> None:
    """Load the model in `folder`, save to `results`/rank.pt what it computes.

    `options`: "load", arguments of the load; "config", those of a DistributedConfig in place of a plan; "steps" of SGD;
    "release", (machine, library, its release there); "save", (kind, folder). In place of all else: "seconds" of
    forwards; "call", (module, function, its arguments after the folder, named ones).
    """
    if "call" in options:
        module, function, others, named = options["call"]
        returned = getattr(importlib.import_module(module), function)(folder, *others, **named)
        torch.save(returned, Path(results, f"{dist.get_rank()}.pt"))
        return
    arguments = options.get("load", {})
    machine, library, release = options.get("release", ("", "", ""))
    if machine == socket.gethostname():
        vars(sys.modules[library])["__version__"] = release
    if "config" in options:
        config = DistributedConfig(**options["config"])
        model = load(folder, tp_plan=None, distributed_config=config, **arguments)
    else:
        model = load(folder, **arguments)
    if "seconds" in options:
        repeat(model, options["seconds"])
        return
    seen = observe(model)
    seen["grads"] = full_gradients(model)
    if "save" in options:
        kind, target = options["save"]
        tp_transformers.save_sharded(model, target) if kind == "sharded" else model.save_pretrained(target)
    seen["losses"] = train(model, options.get("steps", 0))
    seen["machine"], seen["rank"], seen["time"] = socket.gethostname(), model.tp_group.rank, time.time()
    seen["transport"] = type(transport_of(model.tp_group.process_group)).__name__
    torch.save(seen, Path(results, f"{dist.get_rank()}.pt"))


def repeat(model: Any, seconds: float) -> None:
    """Make forwards for some time, and write what comes of it."""
    rank, made = model.tp_group.rank, 0
    expected = model(PROMPTS).logits
    say(f"READY {rank}")
    until = model.tp_group.gather(time.monotonic() + seconds)[0]  # of rank 0: all make as many
    while model.tp_group.gather(time.monotonic() < until)[0]:
        assert torch.equal(model(PROMPTS).logits, expected)
        made += 1
    say(f"DONE {rank} {made}")


def say(line: str) -> None:
    """Write a line at once, in one piece: torchrun passes the outputs of ranks on as they come."""
    sys.stdout.write(line.replace("\n", " ") + "\n")
    sys.stdout.flush()


def train(model: Any, steps: int) -> list[float]:
    """The losses of some steps of SGD on one batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return [step(model, optimizer) for _ in range(steps)]


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    """Take one step; returns its loss."""
    optimizer.zero_grad()
    loss = model(PROMPTS, labels=PROMPTS).loss
    loss.backward()
    optimizer.step()
    return float(loss.item())


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
    except tp_transformers.TensorParallelError as error:
        say(f"RAISED {time.time():.1f} {type(error).__name__}: {error}")
        raise
