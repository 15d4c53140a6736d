"""One rank of `bench_quantised`: `python -m benchmarks.quantised JOB` compares the sides, then times them."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, logging

import tp_transformers
from tp_transformers.features.packed import forward

Tensors = dict[str, torch.Tensor]

GROUP = 128
WIDTHS: dict[str, dict[str, int]] = {
    # 9 query heads on 3 KV heads, and 22 groups of columns between: no even shards on 2 ranks.
    "9/3": {"hidden_size": 1152, "intermediate_size": 2816, "num_attention_heads": 9, "num_key_value_heads": 3},
    "4096": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8},
}
LAYERS = {"9/3": 6, "4096": 2}
EXPERTS = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
# The 16 values of nf4, as bitsandbytes has them.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
PROMPT, STEPS = 512, 8
DEQUANTISED, PACKED, ALL_EXPERTS = "dequantised", "packed", "all experts decoded"


@dataclass(frozen=True)
class Job:
    """The job of one rank for one checkpoint."""

    format: str
    widths: str
    folder: str
    size: int
    rank: int
    rounds: int
    layers: int | None = None
    """Number of layers; None for that of the benchmark."""
    result: str = ""


def gptq(rows: int, columns: int) -> Tensors:
    """4 bits, groups of 128, zero points."""
    return {
        "qweight": _words(columns // 8, rows),
        "qzeros": _words(columns // GROUP, rows // 8),
        "scales": _scales(columns // GROUP, rows).half(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }


def awq(rows: int, columns: int) -> Tensors:
    """4 bits, groups of 128, zero points."""
    return {
        "qweight": _words(columns, rows // 8),
        "qzeros": _words(columns // GROUP, rows // 8),
        "scales": _scales(columns // GROUP, rows).half(),
    }


def int4(rows: int, columns: int) -> Tensors:
    """compressed-tensors `pack-quantized`, groups of 128, symmetric."""
    values = torch.randint(1, 16, (rows, columns), dtype=torch.uint8)  # of mean 8, which is 0
    return {
        "weight_packed": (values[:, ::2] | values[:, 1::2] << 4).view(torch.int32),
        "weight_scale": _scales(rows, columns // GROUP).bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }


def int8(rows: int, columns: int) -> Tensors:
    """compressed-tensors `int-quantized`, a scale per row."""
    return {
        "weight": torch.randint(-127, 128, (rows, columns), dtype=torch.int8),
        "weight_scale": _scales(rows, 1).bfloat16() / 16,
    }


def fp8(rows: int, columns: int) -> Tensors:
    """float8_e4m3fn in blocks of 128 x 128."""
    return {
        "weight": (torch.randn(rows, columns) * 8).to(torch.float8_e4m3fn),
        "weight_scale_inv": _scales(-(-rows // GROUP), columns // GROUP) / 8,
    }


def bnb_int8(rows: int, columns: int) -> Tensors:
    """bitsandbytes' int8, a scale per row."""
    return {
        "weight": torch.randint(-127, 128, (rows, columns), dtype=torch.int8),
        "SCB": _scales(rows) * 8,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def nf4(rows: int, columns: int) -> Tensors:
    """bitsandbytes' nf4, blocks of 64."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    return {
        "weight": torch.randint(256, (rows * columns // 2, 1), dtype=torch.uint8),
        "weight.absmax": _scales(rows * columns // 64) * 8,
        "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def _scales(*shape: int) -> torch.Tensor:
    return (torch.rand(*shape) + 0.5) * 4e-3


def _compressed(form: str, bits: int, group: int | None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if group else "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"all": {"targets": ["Linear"], "weights": weights | {"group_size": group}}},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[Callable[[int, int], Tensors], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "int4": (int4, _compressed("pack-quantized", 4, GROUP)),
    "int8": (int8, _compressed("int-quantized", 8, None)),
    "bnb int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "activation_scheme": "dynamic"}),
}
"""Format -> (the stored tensors of a linear of this many rows and columns, the settings in the config)."""
MXFP4 = "mxfp4"


def write(job: Job) -> None:
    """Write a Llama in the format, or a GPT-OSS in MXFP4, of random integers and scales."""
    torch.manual_seed(0)
    shared = {"vocab_size": 2000, "max_position_embeddings": 2048, "pad_token_id": 0, "tie_word_embeddings": False}
    if job.format == MXFP4:
        types = EXPERTS["layer_types"][: job.layers]
        config = CONFIG_MAPPING["gpt_oss"](
            **{**shared, **EXPERTS, "layer_types": types, "num_hidden_layers": len(types)}
        )
        settings = {"quant_method": MXFP4}
    else:
        config = CONFIG_MAPPING["llama"](
            **shared, **WIDTHS[job.widths], num_hidden_layers=job.layers or LAYERS[job.widths]
        )
        settings = FORMATS[job.format][1]
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    tensors: Tensors = {}
    for name, meta in shapes.items():
        module, _, kind = name.rpartition(".")
        if job.format != MXFP4 and module.endswith("_proj"):
            tensors |= {f"{module}.{part}": value for part, value in FORMATS[job.format][0](*meta.shape).items()}
        elif job.format == MXFP4 and kind in ("gate_up_proj", "down_proj"):
            experts, columns, rows = meta.shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors |= {
                f"{name}_blocks": blocks,
                f"{name}_scales": torch.full(blocks.shape[:-1], 118, dtype=torch.uint8),
            }
        else:
            tensors[name] = torch.ones(meta.shape) if meta.ndim == 1 else torch.randn(meta.shape) * 0.02
            tensors[name] = tensors[name].bfloat16()
    Path(job.folder).mkdir(exist_ok=True)
    save_file(tensors, f"{job.folder}/model.safetensors", metadata={"format": "pt"})
    text = {**config.to_dict(), "dtype": "bfloat16", "quantization_config": settings}
    text["architectures"] = ["GptOssForCausalLM" if job.format == MXFP4 else "LlamaForCausalLM"]
    Path(job.folder, "config.json").write_text(json.dumps(text), encoding="utf-8")


def prompt(length: int) -> torch.Tensor:
    """Random tokens, the same on all ranks: (1, length)."""
    return torch.randint(3, 2000, (1, length), generator=torch.Generator().manual_seed(1))


def decode(model: Any) -> float:
    """Seconds of a decode step: the mean of eight after a prompt of 64 tokens."""
    ids = prompt(64)
    past = model(ids, use_cache=True).past_key_values
    began = time.perf_counter()
    for _ in range(STEPS):
        model(ids[:, :1], past_key_values=past, use_cache=True)
    return (time.perf_counter() - began) / STEPS


def prefill(model: Any) -> float:
    """Seconds of a forward of 512 tokens."""
    began = time.perf_counter()
    model(prompt(PROMPT), use_cache=False, logits_to_keep=1)
    return time.perf_counter() - began


SCENARIOS: dict[str, Callable[[Any], float]] = {"decode": decode, "prefill of 512": prefill}


def decoding_all(scenario: Callable[[Any], float], model: Any) -> float:
    """Seconds of a scenario in which every module decodes its packed weights in full, as without `features/packed`."""
    with mock.patch.object(forward, "PackedTensor", lambda weight: weight.decoded()):
        return scenario(model)


@torch.no_grad()
def run(job: Job) -> dict[str, Any]:
    """Load the sides, compare their logits with those of fp32, and time them in turn."""
    load = AutoModelForCausalLM.from_pretrained
    sides = {
        side: load(job.folder, tp_plan="auto", dtype=torch.bfloat16, tp_dequantize=side == DEQUANTISED).eval()
        for side in (PACKED, DEQUANTISED)
    }
    reports = {side: model.tp_report for side, model in sides.items()}
    exact = load(job.folder, tp_plan="auto", dtype=torch.float32).eval()(prompt(8)).logits
    errors = {
        side: float((model(prompt(8)).logits - exact).abs().max() / exact.abs().max()) for side, model in sides.items()
    }
    if job.format == MXFP4:
        sides[ALL_EXPERTS] = sides[PACKED]
    refused: dict[str, str] = {}
    if job.size == 1:
        tp_transformers.disable()
        try:
            theirs = load(job.folder, dtype=torch.bfloat16).eval()
            theirs(prompt(8))
            sides["transformers"] = theirs
        except Exception as error:
            refused["transformers"] = (str(error).splitlines() or [type(error).__name__])[0][:100]
    seconds: dict[str, dict[str, list[float]]] = {name: {side: [] for side in sides} for name in SCENARIOS}
    for number in range(job.rounds + 1):
        for name, scenario in SCENARIOS.items():
            for side, model in sides.items():
                dist.barrier()
                took = decoding_all(scenario, model) if side == ALL_EXPERTS else scenario(model)
                if number:  # the first round warms up
                    seconds[name][side].append(took)
    return {
        "seconds": seconds,
        "errors": errors,
        "refused": refused,
        "held": {side: report.share for side, report in reports.items()},
        "read": {side: report.bytes_read for side, report in reports.items()},
    }


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{job.folder}.store", rank=job.rank, world_size=job.size)
    if job.rank == 0:
        write(job)
    dist.barrier()
    tp_transformers.enable()
    Path(job.result).write_text(json.dumps(run(job)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
