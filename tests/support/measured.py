"""Tables of measured numbers for the pages, made from the files in `benchmarks/results`: one source for each number."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
EXACTNESS = Path(__file__).parents[1] / "data" / "exactness.json"

TITLES = {"llama": "Llama", "mixtral": "Mixtral", "phi3": "Phi-3", "qwen3": "Qwen3", "olmo2": "OLMo 2"}
"""Name of a benchmark's model -> its name on a page."""

LOADING = {
    "load": "load",
    "load and first forward": "load and first forward",
    "peak anonymous memory above the shard, worst rank": "peak anonymous memory above the shard",
}
"""Measure of loading -> its title on a page."""

SCENARIOS = {
    "prefill": "prefill of 512 tokens",
    "decode": "decode",
    "training step": "training step",
    "generate": "`generate`",
}


def result(name: str) -> tuple[list[dict[str, str]], str]:
    """The table of `benchmarks/results/<name>.md`, a dict of cells by column for each row, and the text below it."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    table, _, remarks = text.partition("\n\n")
    columns, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    return [dict(zip(columns, row, strict=True)) for row in rows], remarks


def loading(page: Path) -> str:
    """Times and memory of loading by both sides, and of pre-sharded files; ratios are transformers' by ours."""
    (mapped, remarks), (presharded, other_remarks) = result("load-cpu-2"), result("load-cpu-2-presharded")
    rows = [
        "| checkpoint | measure | transformers | here | ratio | pre-sharded, `tp_map=True` | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    seen = ""
    for both, alone in zip(mapped, presharded, strict=True):
        if both["measure"] in LOADING:
            assert (both["checkpoint"], both["measure"]) == (alone["checkpoint"], alone["measure"])
            model, size = both["checkpoint"].split(", ")
            title = f"{TITLES[model]}, {size}" if model != seen else ""
            native, ours, ratio = list(both.values())[2:]
            ready, ratio_ready = list(alone.values())[3:]
            ratios = [each.partition(" (")[0] for each in (ratio, ratio_ready)]
            cells = [title, LOADING[both["measure"]], native, ours, ratios[0], ready, ratios[1]]
            rows.append(f"| {' | '.join(cells)} |")
            seen = model
    setting = remarks.partition(" of fresh processes")[0].removeprefix("- ")
    releases = [re.findall(r"transformers ([\d.]+)", each)[0] for each in (remarks, other_remarks)]
    return "\n".join([*rows, "", f"Medians; {setting}; transformers {releases[0]}, pre-sharded {releases[1]}."])


def exactness(page: Path) -> str:
    """Last loss and gradient norm of a short training by number of ranks, and the largest differences of all steps."""
    found = json.loads(EXACTNESS.read_text(encoding="utf-8"))
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
    releases = ", ".join(f"{name} {found['versions'][name]}" for name in ("transformers", "torch"))
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
    measured, _ = result("forward-cpu")
    for model, title in TITLES.items():
        found = {row["scenario"]: row for row in measured if row["model"] == model}
        sides = [(found[name]["transformers by here"], found[name]["one process, all cores"]) for name in SCENARIOS]
        cells = [", ".join(side.partition(" (")[0] for side in each) for each in sides]
        rows.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(rows)
