"""Tables of measured numbers for the pages, made from the files in `benchmarks/results`: one source for each number."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

TITLES = {"llama": "Llama", "mixtral": "Mixtral", "phi3": "Phi-3", "qwen3": "Qwen3", "olmo2": "OLMo 2"}
"""Name of a benchmark's model -> its name on a page."""

LOADING = {
    "load": ("load", 1, " s", 2),
    "first_forward": ("load and first forward", 1, " s", 2),
    "anonymous": ("peak anonymous memory above the shard", 1e6, " MB", 0),
}
"""Measure of loading -> its title, the size of its unit, the unit, and decimals."""

SCENARIOS = {
    "prefill": "prefill of 512 tokens",
    "decode": "decode",
    "training step": "training step",
    "generate": "`generate`",
}


def result(name: str) -> Any:
    """The numbers of `benchmarks/results/<name>.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def loading(page: Path) -> str:
    """Times and memory of loading by both sides, and of pre-sharded files; ratios are transformers' by ours."""
    mapped, presharded = result("load-cpu-2"), result("load-cpu-2-presharded-map")
    rows = [
        "| checkpoint | measure | transformers | here | ratio | pre-sharded, `tp_map=True` | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, numbers in mapped["models"].items():
        title = f"{TITLES[model]}, {numbers['checkpoint']['bytes'] / 1e9:.1f} GB"
        for measure, (meaning, scale, unit, digits) in LOADING.items():
            both, alone = numbers["measures"][measure], presharded["models"][model]["measures"][measure]
            medians = [both["native"]["median"], both["ours"]["median"], alone["presharded"]["median"]]
            native, ours, ready = (f"{median / scale:.{digits}f}{unit}" for median in medians)
            ratio, ratio_ready = (f"{side['ratio']['median']:.3g}" for side in (both, alone))
            rows.append(f"| {title} | {meaning} | {native} | {ours} | {ratio} | {ready} | {ratio_ready} |")
            title = ""
    releases = [each["machine"]["versions"]["transformers"] for each in (mapped, presharded)]
    note = f"{mapped['setting']}, {mapped['pairs']} pairs; transformers {releases[0]}, pre-sharded {releases[1]}"
    return "\n".join([*rows, "", f"Medians; {note}."])


def exactness(page: Path) -> str:
    """Last loss and gradient norm of a short training by number of ranks, and the largest differences of all steps."""
    found = result("exactness-cpu")
    setting, one = found["setting"], found["one"]
    rows = [
        f"| ranks | loss after {setting['steps']} steps | gradient norm | largest difference of a loss | of a norm |",
        "| --- | --- | --- | --- | --- |",
        f"| one process of transformers | {one['losses'][-1]:.6f} | {one['norms'][-1]:.5f} | | |",
    ]
    for ranks, run in found["ranks"].items():
        last = f"{run['losses'][-1]:.6f} | {run['norms'][-1]:.5f}"
        rows.append(f"| {ranks} | {last} | {run['loss']:.0g} | {run['norm']:.0g} |")
    tokens = f"{setting['batch']} x {setting['length']} tokens"
    releases = ", ".join(f"{name} {found['machine']['versions'][name]}" for name in ("transformers", "torch"))
    first, exact = one["norms"][0], found["first_norm_fp64"]
    note = (
        f"Steps of {tokens}; differences are relative, of all steps; {releases}. Norms differ by the sums of squares "
        f"in fp32: the first is {first:.5f} in one process, {found['ranks']['4']['norms'][0]:.5f} on 4 ranks, and "
        f"{exact:.5f} with sums in fp64."
    )
    return "\n".join([*rows, "", textwrap.fill(note, 120, break_on_hyphens=False)])


def computing(page: Path) -> str:
    """Time of transformers' tensor parallelism, and of one process with all cores, by ours; real widths."""
    rows = ["| | " + " | ".join(SCENARIOS.values()) + " |", "| --- |" + " --- |" * len(SCENARIOS)]
    for model, by_ranks in result("forward-cpu")["models"].items():
        scenarios = by_ranks["2"]["scenarios"]
        ratios = [scenarios[name]["ratios"] for name in SCENARIOS]
        cells = [f"{ratio['native']['median']:.2f}, {ratio['alone']['median']:.2f}" for ratio in ratios]
        rows.append(f"| {TITLES[model]} | " + " | ".join(cells) + " |")
    return "\n".join(rows)
