"""Expert parallelism against one process, ours and transformers' own: `python -m benchmarks.bench_expert_exactness`.

One training step of a Mixtral of six experts in fp32, on each number of ranks, where every rank has a batch of its own
(`fsdp_size`) and where all have one (`tp_size`): logits, loss, auxiliary loss, gradients, and the tokens of each expert
are compared with one process of plain transformers. Returns 1 if ours differ by more than TOLERANCE.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, logging
from transformers.distributed import DistributedConfig

import tp_transformers
from tp_transformers.features.verify.differences import relative

from . import machine, processes
from .report import save, shown_machine

RESULTS = Path(__file__).parent / "results"
EXPERTS, SAMPLES, LENGTH, VOCAB = 6, 2, 32, 500
LAYOUTS = {"a batch each": "fsdp_size", "one batch": "tp_size"}
"""What the ranks have -> the field of `DistributedConfig` beside `ep_size`."""
SIDES = ("ours", "transformers")
COLUMNS = ("logits", "loss", "auxiliary loss", "gradients")
TOLERANCE = 1e-5
"""Relative; sums of fp32 in another order."""


def main() -> int:
    """Run the benchmark; writes `results/expert-exactness-cpu.json` and `.md`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_expert_exactness", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="(default: 1 2 3 4 5)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one run may take (default: 300)")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        for layout in LAYOUTS:
            for side in SIDES:
                for size in arguments.ranks:
                    found = measure(folder, layout, side, size, arguments.timeout)
                    rows.append({"ranks have": layout, "by": side, "ep_size": size, **found})
                    print(row(rows[-1]), file=sys.stderr, flush=True)
    result = {
        "command": "python -m benchmarks.bench_expert_exactness",
        "machine": machine.facts(),
        "rows": rows,
    }
    save(RESULTS / "expert-exactness-cpu", result, page(result))
    print(page(result))
    ours = [each for each in rows if each["by"] == SIDES[0]]
    return int(not all("error" not in each and max(each[name] for name in COLUMNS) < TOLERANCE for each in ours))


def make_model(folder: str) -> None:
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=6,
        num_local_experts=EXPERTS,
        output_router_logits=True,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(folder)


@dataclass(frozen=True)
class Job:
    """The job of one rank."""

    folder: str
    layout: str
    side: str
    size: int
    rank: int
    store: str
    """A file by which the ranks meet."""
    result: str = ""


def measure(folder: str, layout: str, side: str, size: int, timeout: float) -> dict[str, Any]:
    """The largest difference of any rank from one process, or the error of the first that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(folder, layout, side, size, 0, f"{scratch}/store")
        found = processes.run_ranks("benchmarks.bench_expert_exactness", job, timeout=timeout)
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        return {"error": errors[0]}
    worst = {name: max(each[name] for each in found) for name in COLUMNS}
    return {**worst, "tokens by expert": all(each["tokens by expert"] for each in found)}


def run_rank(job: Job) -> None:
    """Compute one rank's step, and write its differences, or its error, to `job.result`."""
    logging.disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.size)
    try:
        found = differences(job)
        dist.destroy_process_group()
    except Exception as error:  # of transformers, where it cannot shard: the row says so
        found = {"error": str(error).splitlines()[0]}
    Path(job.result).write_text(json.dumps(found), encoding="utf-8")


def differences(job: Job) -> dict[str, Any]:
    """This rank's differences from one process, by column."""
    if job.side == SIDES[0]:
        tp_transformers.enable()
    field = LAYOUTS[job.layout]
    config = DistributedConfig(**{field: job.size, "ep_size": job.size})
    model = AutoModelForCausalLM.from_pretrained(job.folder, distributed_config=config).train()
    one = AutoModelForCausalLM.from_pretrained(job.folder).train()
    count = job.size if field == "fsdp_size" else 1
    own = job.rank % count
    outputs = model(batch(own), labels=batch(own))
    outputs.loss.backward()
    references = [one(batch(index), labels=batch(index)) for index in range(count)]
    torch.stack([each.loss for each in references]).mean().backward()
    expected = references[own]
    params = dict(model.named_parameters())
    return {
        "logits": relative(outputs.logits, expected.logits),
        "loss": relative(outputs.loss, expected.loss),
        "auxiliary loss": relative(outputs.aux_loss, expected.aux_loss),
        "gradients": max(relative(full_gradient(params[name]), each.grad) for name, each in one.named_parameters()),
        "tokens by expert": tokens_by_expert(outputs.router_logits) == tokens_by_expert(expected.router_logits),
    }


def batch(index: int) -> Tensor:
    return torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(index))


def full_gradient(param: nn.Parameter) -> Tensor:
    """The full gradient of a shard of either side."""
    grad = tp_transformers.full_tensor(param, param.grad)
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def tokens_by_expert(router_logits: tuple[Tensor, ...]) -> list[list[int]]:
    """Number of tokens for each expert of each layer."""
    return [torch.bincount(each.topk(2).indices.flatten(), minlength=EXPERTS).tolist() for each in router_logits]


def row(found: dict[str, Any]) -> str:
    start = f"| {found['ranks have']} | {found['by']} | {found['ep_size']} |"
    if "error" in found:
        return f"{start} {found['error'].replace('|', '/')} | | | | |"
    equal = "equal" if found["tokens by expert"] else "differ"
    return f"{start} {' | '.join(f'{found[name]:.0e}' for name in COLUMNS)} | {equal} |"


def page(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    head = ("ranks have", "by", "`ep_size`", *COLUMNS, "tokens by expert")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *map(row, result["rows"])]
    return (
        f"`{result['command']}`\n\nA Mixtral of {EXPERTS} experts, 12 query heads and 6 KV heads, fp32, a training "
        f"step of {SAMPLES} x {LENGTH} tokens a batch. Largest differences from one process, relative to the largest "
        f"value. {shown_machine(result['machine'])}; {result['machine']['date']}.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        run_rank(Job(**json.loads(sys.argv[1])))
    else:
        sys.exit(main())
