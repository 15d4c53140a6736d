"""One rank of `bench_experts`: `python -m benchmarks.experts JOB` compares the sides, then counts and times them."""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, logging

import tp_transformers
from tp_transformers.plans import Plan

from .forward import Collectives

EXPERTS = "layers.*.mlp.experts"
LOCAL = {f"{EXPERTS}.{name}": "local" for name in ("gate_up_proj", "down_proj")}
SIDES: dict[str, dict[str, str]] = {
    "exchange": {EXPERTS: "moe_all_to_all", **LOCAL},
    "gather": {},
}
"""{side: rules for experts, in addition to the plan}: complete experts that receive their tokens, and sharded experts,
which gather the tokens of all ranks."""
SHAPE = {
    "vocab_size": 2000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 704},
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 176, "decoder_sparse_step": 1},
}
"""Model types -> config fields in addition to SHAPE; both compute equally much per token."""
CUTS: dict[str, dict[str, Any]] = {
    "batch": {"tp_batch_sharded": ["model.layers.*.mlp"]},
    "sequence": {"tp_sequence_parallel": True},
}
"""How tokens are divided over the ranks -> options of the load: by samples (around experts only), or by sequence."""
SAMPLES, LENGTH = 2, 128
"""(samples, tokens) of a rank's batch; by sequence, a rank has equally many tokens."""
TOLERANCE = 1e-4
"""Largest relative difference of losses and gradient norms; the arithmetic is fp32."""


@dataclass(frozen=True)
class Job:
    """The job of one rank: one model, with one way to divide tokens."""

    model: str
    cut: str
    folder: str
    size: int
    rank: int
    rounds: int
    result: str = ""


class Side:
    """A model, and its training step."""

    def __init__(self, name: str, job: Job, mesh: Any) -> None:
        plan = Plan.parse({"extends": job.model, "optional": SIDES[name]}, source=name)
        with tp_transformers.enable():
            self.model = AutoModelForCausalLM.from_pretrained(
                Path(job.folder) / "checkpoint", tp_plan=plan, device_mesh=mesh, dtype=torch.float32, **CUTS[job.cut]
            ).train()
        tp_transformers.data_parallel(self.model, mesh)
        samples, rows = SAMPLES * job.size, slice(job.rank * SAMPLES, (job.rank + 1) * SAMPLES)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, SHAPE["vocab_size"], (samples, LENGTH), generator=generator)
        self.ids = ids[rows] if job.cut == "batch" else ids

    def step(self) -> float:
        self.model.zero_grad()
        loss = self.model(self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        return float(loss.detach())


def main() -> None:
    """Run the job in argv, and write its result."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    job = Job(**json.loads(sys.argv[1]))
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{job.folder}/store", job.size), rank=job.rank, world_size=job.size
    )
    if job.rank == 0:
        torch.manual_seed(0)
        config = CONFIG_MAPPING[job.model](**{**SHAPE, **MODELS[job.model]})
        AutoModelForCausalLM.from_config(config).save_pretrained(Path(job.folder) / "checkpoint")
    dist.barrier()
    mesh = init_device_mesh("cpu", (1, job.size), mesh_dim_names=("dp", "tp"))
    sides = {name: Side(name, job, mesh) for name in SIDES}
    result: dict[str, Any] = {"seen": {}, "counts": {}, "nbytes": {}, "seconds": {name: [] for name in sides}}
    for name, side in sides.items():
        loss = side.step()
        result["seen"][name] = [loss, float(tp_transformers.clip_grad_norm_(side.model, float("inf")))]
        side.model.set_requires_gradient_sync(False)
        with Collectives() as seen:
            side.step()
        side.model.set_requires_gradient_sync(True)
        result["counts"][name], result["nbytes"][name] = seen.counts, seen.nbytes
    expected = torch.tensor(result["seen"]["gather"])
    for name, found in result["seen"].items():
        if not ((torch.tensor(found) - expected).abs() < TOLERANCE * expected.abs()).all():
            raise ValueError(f"{name}: loss and gradient norm {found}, not {expected.tolist()}")
    for turn in range(job.rounds):
        for name in list(sides) if turn % 2 == 0 else reversed(sides):
            dist.barrier()
            began = time.perf_counter()
            sides[name].step()
            result["seconds"][name].append(time.perf_counter() - began)
    Path(job.result).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
