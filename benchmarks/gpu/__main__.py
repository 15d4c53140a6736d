"""Everything that only a GPU can prove, by one command: `python -m benchmarks.gpu --minutes 8`.

The steps run in order of value, each in processes of its own with a limit on its time; a step that ends early leaves
its time to the others. Each measurement is written when it is made: `gpu.json`, `gpu.md`, `gpu.log` and charts in the
folder of the results are complete after every step. A second call in the same folder keeps the steps that passed with
the same code, and runs the others. `--device cpu --rehearse` runs all of it on a CPU, with small shapes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import processes
from .charts import draw
from .device import device_of
from .reckoned import H200, table

STEPS: dict[str, tuple[float, str]] = {
    "machine": (60, "the machine, its limits, and ranks that share a GPU"),
    "tests": (110, "exactness, memory, training, faults, packed weights, graphs and mixers"),
    "decode": (160, "decode steps: eager, CUDA graphs, compiled; against transformers"),
    "load": (80, "loading 16 GB, warm and cold, against transformers"),
    "train": (45, "a training step, with a trace"),
    "collectives": (15, "sums over ranks"),
    "more_tests": (40, "more shapes of the tests"),
}
"""Step -> (share of the time, of 510 seconds; subject), by value."""
NEED_CHECKPOINT = {"decode", "load", "train"}
"""Steps that wait for the checkpoint, which is written during the steps before them."""
WAITING = 90.0
"""Most seconds that a step waits for it."""
RESULTS = Path(__file__).parent.parent / "results" / "gpu"
PASSED, FAILED, LATE = "passed", "FAILED", "out of time"


def main() -> int:
    """Run the steps; returns 1 if one failed or ran out of time."""
    arguments = _parse()
    if arguments.reckon:
        modules = {name: import_module(f"{__package__}.{name}") for name in arguments.only}
        print("\n".join(table({name: module.reckon(H200) for name, module in modules.items()}, H200)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the started processes
    arguments.results.mkdir(parents=True, exist_ok=True)
    record = Record(arguments)
    end = time.time() + 60 * arguments.minutes
    pending = [name for name in arguments.only if not record.has_passed(name)]
    with _prepared(arguments, end, record.folder) if NEED_CHECKPOINT & set(pending) else nullcontext() as wait:
        for number, name in enumerate(pending):
            if name in NEED_CHECKPOINT and wait is not None:
                wait()
            weights = [STEPS[each][0] for each in pending[number:]]
            limit = (end - time.time()) * weights[0] / sum(weights)
            print(f"{name}: {STEPS[name][1]}; at most {limit:.0f} s", flush=True)
            record.add(name, _run(name, arguments, record, limit))
            print(f"{name}: {record.steps[name]['status']} after {record.steps[name]['seconds']:.0f} s", flush=True)
    print(f"\n{record.summary()}")
    return 0 if all(record.has_passed(name) for name in arguments.only) else 1


class Record:
    """The results of all steps, in files."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Read the results of an earlier call with the same code and device."""
        self.folder = arguments.results
        self.about = {"device": device_of(arguments.device).name(), "rehearsal": arguments.rehearse, "code": _code()}
        self.steps: dict[str, dict[str, Any]] = {}
        path = self.folder / "gpu.json"
        if path.exists() and not arguments.again:
            found = json.loads(path.read_text(encoding="utf-8"))
            self.steps = found["steps"] if found["about"] == self.about else {}

    def has_passed(self, name: str) -> bool:
        return self.steps.get(name, {}).get("status") == PASSED

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Keep the results of a step, and write all files."""
        self.steps[name] = found
        text = json.dumps({"about": self.about, "steps": self.steps}, indent=1)
        (self.folder / "gpu.json").write_text(text, encoding="utf-8")
        try:
            (self.folder / "gpu.md").write_text(self.page(), encoding="utf-8")
            draw(self.steps, self.folder)
        except Exception:  # the other steps are worth more than a table
            traceback.print_exc()

    def backend(self) -> str:
        """The backend by which ranks on one device communicate, as `machine` has found it."""
        lines = self.steps.get("machine", {}).get("lines", [])
        return next((line["backend"] for line in lines if "backend" in line), "gloo")

    def summary(self) -> str:
        """A line for each step, and one for each measurement that failed or had no time."""
        lines = []
        for name, step in self.steps.items():
            lines.append(f"{name}: {step['status']}, {step['seconds']:.0f} s, {len(step['lines'])} measurements")
            lines += [f"  FAILED  {line['what']}: {line['error']}" for line in step["lines"] if "error" in line]
            lines += [f"  NOT RUN {line['what']}: {line['late']}" for line in step["lines"] if "late" in line]
            lines += [f"  {step['error'].splitlines()[0]}"] if step["error"] else []
        return "\n".join(lines)

    def page(self) -> str:
        """All tables in Markdown."""
        parts = ["| step | status | seconds | subject |\n| --- | --- | --- | --- |"]
        for name, step in self.steps.items():
            parts[0] += f"\n| {name} | {step['status']} | {step['seconds']:.0f} | {STEPS[name][1]} |"
        for name, step in self.steps.items():
            rows = import_module(f"{__package__}.{name}").table(step["lines"])
            parts.append(f"## {name.capitalize()}\n\n" + "\n".join(rows))
        parts.append(f"```text\n{self.summary()}\n```")
        return "\n\n".join(parts) + "\n"


@contextmanager
def _prepared(arguments: argparse.Namespace, end: float, folder: Path) -> Iterator[Callable[[], None]]:
    """Write the checkpoint in a process of its own; yields a function that waits for it."""
    with tempfile.TemporaryDirectory() as scratch, (folder / "gpu.log").open("ab") as log:
        job = {**_job("prepare", arguments, end, Path(scratch), "gloo"), "result": f"{scratch}/result"}
        command = [sys.executable, "-m", f"{__package__}.step", json.dumps(job)]
        process = subprocess.Popen(command, cwd=processes.ROOT, stdout=log, stderr=log, start_new_session=True)

        def prepared() -> None:
            with suppress(subprocess.TimeoutExpired):  # then the step says that it has no time, or writes it again
                process.wait(max(0.0, min(WAITING, end - time.time())))

        try:
            yield prepared
        finally:
            processes.end(process)


def _run(name: str, arguments: argparse.Namespace, record: Record, limit: float) -> dict[str, Any]:
    """Run a step: its status, seconds and measurements, and the error of its process."""
    began = time.time()
    job = _job(name, arguments, began + limit, record.folder, record.backend())
    lines = Path(job["lines"])
    lines.write_text("", encoding="utf-8")
    error = ""
    try:
        with (record.folder / "gpu.log").open("ab") as log:
            processes.run(f"{__package__}.step", [job], timeout=limit, log=log)
    except processes.ProcessError as failure:
        error = str(failure)
    found = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    lines.unlink()
    seconds = time.time() - began
    if any("error" in line for line in found) or (error and seconds < limit):
        status = FAILED
    else:
        status = LATE if error or any("late" in line for line in found) else PASSED
    return {"status": status, "seconds": seconds, "lines": found, "error": error}


def _job(name: str, arguments: argparse.Namespace, end: float, out: Path, backend: str) -> dict[str, Any]:
    """The `step.Job` of a step."""
    return {
        "step": name,
        "kind": arguments.device,
        "rehearses": arguments.rehearse,
        "folder": str(arguments.folder),
        "out": str(out),
        "lines": str(out / f".{name}.jsonl"),
        "until": end,
        "backend": backend,
    }


def _code() -> str:
    """A digest of the package, its plans, these benchmarks and the tests that they run."""
    digest = hashlib.sha256()
    for folder in ("tp_transformers", "model_plans", "benchmarks", "tests/gpu", "tests/support"):
        for path in sorted((processes.ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=8, help="for all steps together (default: 8)")
    add("--only", default=",".join(STEPS), help=f"steps, of {','.join(STEPS)} (default: all)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--rehearse", action="store_true", help="small shapes; with --device cpu, stand-ins for CUDA's own parts")
    add("--reckon", action="store_true", help=f"print the time of each step on one {H200.name}, and run nothing")
    add("--again", action="store_true", help="run steps that have passed before too")
    add("--results", type=Path, default=RESULTS, help="folder of the results")
    add("--folder", type=Path, default=Path("/tmp/tp_transformers-gpu"), help="folder of the checkpoint, 16 GB")
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    if unknown := set(arguments.only) - set(STEPS):
        parser.error(f"--only: got {', '.join(sorted(unknown))}, expected some of {', '.join(STEPS)}")
    if arguments.device == "cpu" and not arguments.rehearse:
        parser.error("--device cpu: this is a rehearsal; add --rehearse")
    arguments.results, arguments.folder = arguments.results.resolve(), arguments.folder.resolve()
    return arguments


if __name__ == "__main__":
    sys.exit(main())
