"""Computing with packed weights, against the same weights dequantised: `python -m benchmarks quantised`.

Every rank loads a checkpoint of random integers twice, packed and dequantised to bfloat16, and compares the logits of
both with those of a dequantised model in fp32. Then a decode step and a prefill are timed, the sides in turn. On one
rank, transformers computes too, with the format's own package, if that is installed and works on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

import tp_transformers
from tp_transformers.features.packed import forward

from . import processes
from .checkpoints import write
from .formats import FORMATS, GROUP, MXFP4
from .ranks import in_turn, joined, prompts
from .report import compared, page, shown_spread

WIDTHS: dict[str, dict[str, int]] = {
    # 9 query heads on 3 KV heads, and 22 groups of columns between: no even shards on 2 ranks.
    "9/3": {"hidden_size": 1152, "intermediate_size": 2816, "num_attention_heads": 9, "num_key_value_heads": 3},
    "4096": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8},
}
LAYERS = {"9/3": 6, "4096": 2}
EXPERTS = {
    "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
PROMPT, STEPS, VOCABULARY = 512, 8, 2000
DEQUANTISED, PACKED, ALL_EXPERTS = "dequantised", "packed", "all experts decoded"


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Add the options, and read them."""
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 3], help="numbers of ranks (default: 1 2 3)")
    add("--rounds", type=int, default=5, help="how often every side computes (default: 5)")
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    add("--widths", nargs="+", choices=WIDTHS, default=["9/3"], help="query/KV heads, or a width (default: 9/3)")
    add("--timeout", type=float, default=600, help="seconds that one checkpoint may take")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure all formats. Raises ProcessError if a process fails or takes too long."""
    result |= {"rounds": arguments.rounds, "rows": []}
    for widths in arguments.widths:
        for form in arguments.formats:
            if form == MXFP4 and widths != arguments.widths[0]:  # it has a shape of its own
                continue
            with tempfile.TemporaryDirectory() as scratch:
                write(Path(scratch, "model"), config_of(form, widths), form)
                for size in arguments.ranks:
                    job = {"form": form, "folder": f"{scratch}/model", "size": size, "rounds": arguments.rounds}
                    ranks = processes.run_ranks(f"{__name__}:on_rank", job, threads=1, timeout=arguments.timeout)
                    result["rows"].append(_summary(form, widths, size, ranks))
                    print(_line(result["rows"][-1]), flush=True)


def config_of(form: str, widths: str, layers: int | None = None) -> PretrainedConfig:
    """A Llama, or for MXFP4 a GPT-OSS; `layers`: None for as many as the benchmark has."""
    fields = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "pad_token_id": 0}
    fields |= {"tie_word_embeddings": False, "num_hidden_layers": layers or (6 if form == MXFP4 else LAYERS[widths])}
    if form == MXFP4:
        return CONFIG_MAPPING["gpt_oss"](**fields, **EXPERTS)
    return CONFIG_MAPPING["llama"](**fields, **WIDTHS[widths])


def decode(model: Any) -> float:
    """Seconds of a decode step: the mean of eight after a prompt of 64 tokens."""
    ids = prompts(VOCABULARY, 1, 64)
    past = model(ids, use_cache=True).past_key_values
    began = time.perf_counter()
    for _ in range(STEPS):
        model(ids[:, :1], past_key_values=past, use_cache=True)
    return (time.perf_counter() - began) / STEPS


def prefill(model: Any, length: int = PROMPT) -> float:
    """Seconds of a forward of `length` tokens."""
    began = time.perf_counter()
    model(prompts(VOCABULARY, 1, length), use_cache=False, logits_to_keep=1)
    return time.perf_counter() - began


SCENARIOS: dict[str, Callable[[Any], float]] = {"decode": decode, "prefill of 512": prefill}


@torch.no_grad()
def on_rank(form: str, folder: str, store: str, size: int, rank: int, rounds: int) -> dict[str, Any]:
    """Load the sides, compare their logits with those of fp32, and time them in turn."""
    load = AutoModelForCausalLM.from_pretrained
    refused: dict[str, str] = {}
    ids = prompts(VOCABULARY, 1, 8)
    with joined(store, rank, size):
        with tp_transformers.enable():
            sides = {
                side: load(folder, tp_plan="auto", dtype=torch.bfloat16, tp_dequantize=side == DEQUANTISED).eval()
                for side in (PACKED, DEQUANTISED)
            }
            exact = load(folder, tp_plan="auto", dtype=torch.float32).eval()(ids).logits
        reports = {side: model.tp_report for side, model in sides.items()}
        differences = {side: (model(ids).logits - exact).abs().max() for side, model in sides.items()}
        if size == 1:
            try:
                sides["transformers"] = load(folder, dtype=torch.bfloat16).eval()
                sides["transformers"](ids)
            except Exception as error:
                sides.pop("transformers", None)
                refused["transformers"] = (str(error).splitlines() or [type(error).__name__])[0][:100]
        seconds = {}
        for name, scenario in SCENARIOS.items():
            calls = {side: partial(after_barrier, scenario, model) for side, model in sides.items()}
            if form == MXFP4:
                calls[ALL_EXPERTS] = partial(_decoding_all, calls[PACKED])
            in_turn(calls, 1)  # warms up
            seconds[name] = in_turn(calls, rounds)
    return {
        "seconds": seconds,
        "errors": {side: float(most / exact.abs().max()) for side, most in differences.items()},
        "refused": refused,
        "held": {side: report.share for side, report in reports.items()},
        "read": {side: report.bytes_read for side, report in reports.items()},
    }


def after_barrier(scenario: Callable[[Any], float], model: Any) -> float:
    """Seconds of a scenario, which all ranks begin at once."""
    dist.barrier()
    return scenario(model)


def _decoding_all(call: Callable[[], float]) -> float:
    """Seconds of a call in which every module decodes its packed weights in full, as without `features/packed`."""
    with mock.patch.object(forward, "PackedTensor", lambda weight: weight.decoded()):
        return call()


def _summary(name: str, widths: str, size: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of each side's seconds to those of the dequantised weights, the slowest rank; the most bytes of a rank."""
    found: dict[str, Any] = {"format": name, "widths": widths, "ranks": size, "ratios": {}, "seconds": {}}
    for scenario in ranks[0]["seconds"]:
        sides = compared([rank["seconds"][scenario] for rank in ranks], DEQUANTISED)
        found["seconds"][scenario], found["ratios"][scenario] = sides["seconds"], sides["ratios"]
    for kind in ("held", "read"):
        found[kind] = {side: max(rank[kind][side] for rank in ranks) for side in (PACKED, DEQUANTISED)}
    found["errors"] = {side: max(rank["errors"][side] for rank in ranks) for side in ranks[0]["errors"]}
    return found | {"refused": ranks[0]["refused"]}


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all rows; the machine and versions are below it."""
    refused = {row["format"]: why for row in result["rows"] for why in row["refused"].values()}
    return page(
        result,
        ["format", "shape", "ranks", "decode", "prefill of 512", "transformers: decode, prefill", "held", "error"],
        map(_line, result["rows"]),
        "decode, prefill: seconds of packed weights / of the same weights dequantised to bfloat16, the slowest rank, "
        f"median (min to max) of {result['rounds']} rounds, the sides in turn; a decode is the mean of {STEPS} steps; "
        "gloo ranks with one thread each",
        *(
            f"{row['format']}, {row['ranks']} ranks, {ALL_EXPERTS} in each module: "
            + ", ".join(f"{name} {shown_spread(found[ALL_EXPERTS])}" for name, found in row["ratios"].items())
            for row in result["rows"]
            if ALL_EXPERTS in row["ratios"]["decode"]
        ),
        f"int4, gptq, awq: groups of {GROUP}; int8: a scale per row; nf4: blocks of 64; fp8: blocks of {GROUP} x "
        f"{GROUP}; mxfp4: GPT-OSS, 32 experts, 4 of them for a token",
        "held: most bytes of a rank, packed / dequantised; error: largest difference of logits to those of fp32, "
        "relative to the largest logit, packed / dequantised",
        *(f"{name}: transformers is not timed: {why}" for name, why in refused.items()),
    )


def _line(row: dict[str, Any]) -> str:
    ratios = row["ratios"]
    others = [shown_spread(found["transformers"]) for found in ratios.values() if "transformers" in found]
    cells = [row["format"], row["widths"] if row["format"] != MXFP4 else "experts", str(row["ranks"])]
    cells += [shown_spread(found[PACKED]) for found in ratios.values()]
    cells += [", ".join(others) or "-"]
    packed, dequantised = (row["held"][side] / 1e6 for side in (PACKED, DEQUANTISED))
    cells.append(f"{packed:.1f} / {dequantised:.1f} MB")
    cells.append(" / ".join(f"{row['errors'][side]:.1e}" for side in (PACKED, DEQUANTISED)))
    return f"| {' | '.join(cells)} |"
