"""One rank of `bench_speeds`: `python -m benchmarks.speeds JOB` times decode steps and prompts of one checkpoint."""

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
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, logging

import tp_transformers

from .forward import MODELS, SHARED, WIDTHS
from .quantised import FORMATS, GROUP, Tensors, decode, int4, prompt

PROMPT = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int4": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """The job of one rank for one checkpoint."""

    model: str
    dtype: str
    folder: str
    size: int
    rank: int
    rounds: int
    store: str
    """File for the rendezvous of the ranks."""
    result: str = ""


def write(job: Job) -> None:
    """Write a checkpoint of random weights; int4: linears of layers in groups of 128."""
    dtype, widths = DTYPES[job.dtype], WIDTHS["real"]
    heads = {"num_key_value_heads": widths["num_attention_heads"] // 2}
    config = CONFIG_MAPPING[job.model](**SHARED, **widths, **heads, **MODELS[job.model])
    if job.model == "mixtral":
        config.intermediate_size = 11 * GROUP
    with torch.device("meta"):
        params = AutoModelForCausalLM.from_config(config).state_dict()
    tensors: Tensors = {}
    for name, shape in (each for key, param in params.items() for each in _stored(key, param.shape)):
        if job.dtype == "int4" and name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            tensors |= {f"{name[:-7]}.{part}": value for part, value in int4(*shape).items()}
        else:
            value = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.02
            tensors[name] = value.to(dtype)
    Path(job.folder).mkdir()
    save_file(tensors, f"{job.folder}/model.safetensors", metadata={"format": "pt"})
    text = {**config.to_dict(), "dtype": str(dtype)[6:]}
    text["architectures"] = [{"llama": "Llama", "mixtral": "Mixtral", "phi3": "Phi3"}[job.model] + "ForCausalLM"]
    if job.dtype == "int4":
        settings = FORMATS["int4"][1]
        text["quantization_config"] = {**settings, "ignore": ["lm_head", "re:.*block_sparse_moe.gate$"]}
    Path(job.folder, "config.json").write_text(json.dumps(text), encoding="utf-8")


def _stored(name: str, shape: torch.Size) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in a checkpoint: Mixtral's experts are stored one by one."""
    name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.").replace(".mlp.experts.", ".block_sparse_moe.experts.")
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [(name, tuple(shape))]
    parts = (
        {"w1": (shape[1] // 2, shape[2]), "w3": (shape[1] // 2, shape[2])} if "gate_up" in name else {"w2": shape[1:]}
    )
    stem = name.rpartition(".")[0]
    return [(f"{stem}.{i}.{part}.weight", tuple(dims)) for i in range(shape[0]) for part, dims in parts.items()]


def prefill(model: Any) -> float:
    """Seconds of a forward of PROMPT tokens."""
    began = time.perf_counter()
    model(prompt(PROMPT), use_cache=False, logits_to_keep=1)
    return time.perf_counter() - began


SCENARIOS = {"decode": decode, "prefill": prefill}


@torch.no_grad()
def run(job: Job) -> dict[str, list[float]]:
    """Seconds of each scenario in each round."""
    model = AutoModelForCausalLM.from_pretrained(
        job.folder, tp_plan="auto", dtype=DTYPES[job.dtype], tp_dequantize=job.dtype != "int4", tp_map=False
    ).eval()
    seconds: dict[str, list[float]] = {name: [] for name in SCENARIOS}
    for number in range(job.rounds + 1):
        for name, scenario in SCENARIOS.items():
            dist.barrier()
            took = scenario(model)
            if number:  # the first round warms up
                seconds[name].append(took)
    return seconds


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.size)
    if job.rank == 0 and not Path(job.folder).exists():
        write(job)
    dist.barrier()
    tp_transformers.enable()
    Path(job.result).write_text(json.dumps(run(job)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
