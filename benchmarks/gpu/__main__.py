"""Everything that only a GPU can prove, by one command: `python -m benchmarks.gpu --minutes 8`.

The steps run in order of value, each in a copy of this process, which has imported what they need, and with a limit on
its time; a step that ends early leaves its time to the others. `gpu.json`, `gpu.md` and `gpu.log` in the folder of the
results have each measurement as soon as it is made, and the first table of `gpu.md` has all steps from the beginning:
a run that is cut short leaves them. A second call in the same folder keeps the steps that passed with the same code,
and runs the others. `--device cpu --rehearse` runs all of it on a CPU, with small shapes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import processes
from ..report import head
from .step import MORE, Job, module_of, result_of, table_of


@dataclass(frozen=True)
class Step:
    """A step: a module of this folder."""

    seconds: float
    """On one H200, reckoned from bytes and operations: 8 GB/s from the page cache, 1.5 from storage, 60 s a model that
    is compiled, 12 s a process that imports torch."""
    needs_checkpoint: bool = True
    """True if it waits for the checkpoint, which is written during the steps before."""


START = 15.0
"""Seconds before the first step: imports, and the device's name."""
STEPS = {
    "machine": Step(18, needs_checkpoint=False),
    "tests": Step(166, needs_checkpoint=False),
    "decode": Step(143),
    "load": Step(57),
    "train": Step(18),
    "more_decode": Step(167),
    "more_tests": Step(263, needs_checkpoint=False),
}
"""Name -> step, by value."""
LATER = [name for name in STEPS if name.startswith(MORE)]
"""Steps that run only if the time that is left is enough for them."""
WAITING = 90.0
"""Most seconds that a step waits for it."""
IMPORTED = ("transformers.models.llama.modeling_llama", "benchmarks.worker", "tp_transformers.commands.cli")
"""Modules that the steps need, beside those of this folder; they do not use the GPU as they are imported."""
RESULTS = Path(__file__).parent.parent / "results" / "gpu"
WAITS, RUNS, PASSED, FAILED, LATE, OMITTED = "not begun", "begun", "passed", "FAILED", "out of time", "left out"


def main() -> int:
    """Run the steps; returns 1 if one failed or ran out of time."""
    arguments = _parse()
    if arguments.reckon:
        print("\n".join(reckoned()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the started processes
    arguments.results.mkdir(parents=True, exist_ok=True)
    end = time.time() + 60 * arguments.minutes
    arguments.copies = _imported()
    device = _found(arguments)
    arguments.copies &= device["is_of_a_copy"]
    record = Record(arguments, device)
    pending = [name for name in arguments.only if not record.has_passed(name)]
    needed = any(STEPS[name].needs_checkpoint for name in pending)
    with _prepared(arguments, end, record) if needed else nullcontext() as wait:
        for number, name in enumerate(pending):
            step = STEPS[name]
            if step.needs_checkpoint and wait is not None:
                wait()
            left = end - time.time()
            if name in LATER and left < step.seconds and not arguments.rehearse:
                record.add(name, {"status": OMITTED, "seconds": 0.0, "lines": [], "error": ""})
                continue
            others = sum(STEPS[each].seconds for each in pending[number + 1 :] if each not in LATER)
            limit = left * step.seconds / (step.seconds + others)
            print(f"{name}: {step.seconds:.0f} s reckoned, at most {limit:.0f} s", flush=True)
            record.add(name, _run(name, arguments, record, limit))
            print(f"{name}: {record.steps[name]['status']} after {record.steps[name]['seconds']:.0f} s", flush=True)
    print(f"\n{record.summary()}\n")
    print("\n".join(reckoned()))
    done = (PASSED, OMITTED)
    return 0 if all(record.steps[name]["status"] in done for name in arguments.only) else 1


def reckoned() -> list[str]:
    """Markdown rows of the seconds of each step, and of all but LATER together."""
    seconds = {"start": START, **{name: step.seconds for name, step in STEPS.items()}}
    total = sum(value for name, value in seconds.items() if name not in LATER)
    rows = {name: f"| {name} | {value:.0f} |" for name, value in seconds.items()}
    later = [rows.pop(name) for name in LATER]
    summed = f"| all of these | {total:.0f} ({total / 60:.1f} minutes) |"
    return [*head("step", "seconds on one H200"), *rows.values(), summed, *later]


def _imported() -> bool:
    """Import what the steps need; returns True if their processes can be copies of this one, which uses no GPU."""
    # Without NVML, torch would count the GPUs by creating a context, after which a copy cannot use them.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for name in STEPS:
        module_of(name)
    for name in IMPORTED:
        import_module(name)
    import torch

    return not torch.cuda.is_initialized()


def _found(arguments: argparse.Namespace) -> dict[str, Any]:
    """The device's name, and the number of devices, as a process sees them that uses one.

    If a copy of this process cannot use the device, no process of this run will be a copy.
    """
    for copy in (True, False) if arguments.copies else (False,):
        with suppress(processes.ProcessError):
            (found,) = processes.run(f"{__package__}.device:found", [{"kind": arguments.device}], timeout=60, copy=copy)
            return {**found, "is_of_a_copy": copy}
    sys.exit(f"--device {arguments.device}: torch cannot use it here; see `tp-transformers env`")


class Record:
    """The results of all steps, in files."""

    def __init__(self, arguments: argparse.Namespace, device: dict[str, Any]) -> None:
        """Read the results of an earlier call with the same code and device, and write those of this one.

        `device`: its "name", and the "count" of devices.
        """
        self.folder, self.devices = arguments.results, device["count"]
        self.log = self.folder / "gpu.log"
        self.about = {"device": device["name"], "rehearsal": arguments.rehearse, "code": _code()}
        self.steps: dict[str, dict[str, Any]] = {}
        path = self.folder / "gpu.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            self.steps = found["steps"] if found["about"] == self.about else {}
        self.write()

    def has_passed(self, name: str) -> bool:
        return self.steps.get(name, {}).get("status") == PASSED

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Keep what is known of a step, and write the files."""
        self.steps[name] = found
        self.write()

    def write(self) -> None:
        """Write `gpu.json` and `gpu.md`, each at once."""
        self._write("gpu.json", json.dumps({"about": self.about, "steps": self.steps}, indent=1))
        try:
            self._write("gpu.md", self.page())
        except Exception:  # the other steps are worth more than a table
            traceback.print_exc()

    def _write(self, name: str, text: str) -> None:
        new = self.folder / f".{name}"
        new.write_text(text, encoding="utf-8")
        new.replace(self.folder / name)

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
        rows = head(f"step, on {self.about['device']}", "status", "seconds", "reckoned", "measured", "result")
        parts = []
        for name in STEPS:
            step = self.steps.get(name, {"status": WAITS, "seconds": 0.0, "lines": []})
            right = sum("error" not in line and "late" not in line for line in step["lines"])
            shown = result_of(name, step["lines"]) if right else ""
            times = f"{step['seconds']:.0f} | {STEPS[name].seconds:.0f}"
            rows.append(f"| {name} | {step['status']} | {times} | {right} of {len(step['lines'])} | {shown} |")
        for name, step in self.steps.items():
            parts.append(f"## {name.capitalize()}\n\n" + "\n".join(table_of(name, step["lines"])))
        parts.insert(0, "\n".join(rows))
        parts.append(f"```text\n{self.summary()}\n```")
        return "\n\n".join(parts) + "\n"


@contextmanager
def _prepared(arguments: argparse.Namespace, end: float, record: Record) -> Iterator[Callable[[], None]]:
    """Write the checkpoint in a process of its own; yields a function that waits for it."""
    with tempfile.TemporaryDirectory() as scratch:
        job, files = _job("shapes", arguments, end, Path(scratch), record), (Path(scratch, "result"), record.log)
        process = processes.start(f"{__package__}.step:run", job, *files, copy=arguments.copies)
        try:
            # A step then says that it has no time, or writes it again.
            yield lambda: process.join(max(0.0, min(WAITING, end - time.time())))
        finally:
            processes.end(process)


def _run(name: str, arguments: argparse.Namespace, record: Record, limit: float) -> dict[str, Any]:
    """Run a step: its status, seconds and measurements, and the error of its process."""
    began = time.time()
    job = _job(name, arguments, began + limit, record.folder, record)
    lines = Path(job["lines"])
    lines.write_text("", encoding="utf-8")
    found: dict[str, Any] = {"status": RUNS, "seconds": 0.0, "lines": [], "error": ""}
    record.add(name, found)

    def read() -> None:
        """Take the measurements that the step has written since, and write the files if there are any."""
        written = [
            json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines(keepends=True) if "\n" in line
        ]
        found["seconds"] = time.time() - began
        if len(written) > len(found["lines"]):
            found["lines"] = written
            record.write()

    try:
        processes.run(
            f"{__package__}.step:run",
            [job],
            timeout=limit,
            log=record.log,
            copy=arguments.copies,
            watch=read,
        )
    except processes.ProcessError as failure:
        found["error"] = str(failure)
    read()
    lines.unlink()
    if any("error" in line for line in found["lines"]) or (found["error"] and found["seconds"] < limit):
        found["status"] = FAILED
    else:
        found["status"] = LATE if found["error"] or any("late" in line for line in found["lines"]) else PASSED
    return found


def _job(name: str, arguments: argparse.Namespace, end: float, out: Path, record: Record) -> dict[str, Any]:
    """The `Job` of a step."""
    where = (str(arguments.folder), str(out), str(out / f".{name}.jsonl"))
    about = (record.devices, arguments.copies, record.backend())
    return asdict(Job(name, arguments.device, arguments.rehearse, *where, end, *about))


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
    add("--reckon", action="store_true", help="print the time of each step on one H200, and run nothing")
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
