"""One rank of `bench_options`: `python -m benchmarks.load_options JOB` compares the sides, then times them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, logging

import tp_transformers

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 8000,
}
PROMPT, TOKENS = 256, 12
"""Tokens of a prompt, and tokens that are generated after 16 of them."""
TOLERANCE = 0.05
"""Largest relative difference of the logits of two sides; the arithmetic is bf16."""
SLICE = 0.002
"""Seconds for which the slow rank is stopped, and then runs."""

_STOP = """
import os, signal, sys, time
process = int(sys.argv[1])
while True:
    os.kill(process, signal.SIGSTOP)
    time.sleep({slice})
    os.kill(process, signal.SIGCONT)
    time.sleep({slice})
"""


@dataclass(frozen=True)
class Job:
    """The job of one rank."""

    folder: str
    size: int
    rank: int
    rounds: int
    sides: dict[str, dict[str, Any]]
    """Side -> its options of `from_pretrained`."""
    is_slowed: bool = False
    """True if the last rank runs half of the time."""
    result: str = ""


@contextmanager
def at_half_speed(wanted: bool) -> Iterator[None]:
    """Within the context another process stops this one for half of the time, if `wanted`."""
    if not wanted:
        yield
        return
    command = [sys.executable, "-c", _STOP.format(slice=SLICE), str(os.getpid())]
    with subprocess.Popen(command) as stopper:
        try:
            yield
        finally:
            stopper.kill()


def steps(model: Any) -> dict[str, Callable[[], object]]:
    """Task -> one step of it."""
    ids = torch.randint(3, SHAPE["vocab_size"], (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def prefill() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)

    def decode() -> None:
        model.generate(ids[:, :16], max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)

    def train() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return {"prefill": prefill, "decode": decode, "training": train}


def main() -> None:
    """Run the job in argv, and write its result."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[job.rank]})
    store = dist.FileStore(f"{job.folder}/store", job.size)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size)
    checkpoint = Path(job.folder) / "checkpoint"
    if job.rank == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(checkpoint)
    dist.barrier()
    with at_half_speed(job.is_slowed and job.rank == job.size - 1), tp_transformers.enable():
        models = {
            name: AutoModelForCausalLM.from_pretrained(checkpoint, tp_plan="auto", **options)
            for name, options in job.sides.items()
        }
        result: dict[str, Any] = {
            "shares": {name: model.tp_report.tp_shares for name, model in models.items()},
            "held": {name: model.tp_report.share for name, model in models.items()},
            "seconds": {},
        }
        _compare(models)
        for task in steps(None):
            seconds: dict[str, list[float]] = {name: [] for name in models}
            for turn in range(job.rounds + 1):
                for name in list(models) if turn % 2 == 0 else reversed(models):
                    dist.barrier()
                    began = time.perf_counter()
                    steps(models[name])[task]()
                    dist.barrier()
                    seconds[name] += [time.perf_counter() - began] * (turn > 0)
            result["seconds"][task] = seconds
    Path(job.result).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def _compare(models: dict[str, Any]) -> None:
    """Raise ValueError if the sides do not compute the same."""
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        first, *others = (model(ids).logits.float() for model in models.values())
    if any((other - first).abs().max() > TOLERANCE * first.abs().max() for other in others):
        raise ValueError("the sides compute different logits")


if __name__ == "__main__":
    main()
