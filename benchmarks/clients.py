"""Third-party clients on 2 and 3 ranks, compared with one process of plain transformers.

Runs the examples, lm_eval's own option, and the commands `serve` and `chat` on a model with 9 query and 3 KV heads.
Prints a table: client, version, the output of one process, and by number of ranks the difference of the output and the
seconds from the start to the end.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tp_transformers.features.run.launch import end_with_parent
from tp_transformers.features.serve.chat import answers

from .demo import prepare
from .processes import ROOT, free_port
from .tasks import TASKS, write_tasks

EXAMPLES = ROOT / "examples"
TIMEOUT = 900
"""Timeout of one client in seconds."""

QUESTION = "Why is the sky blue?"
PYTHON = (sys.executable, "-m")


class ClientError(Exception):
    """A client failed or timed out; the message has its output."""


@dataclass(frozen=True)
class Client:
    """One client, and how to run it."""

    name: str
    modules: tuple[str, ...]
    """Required packages; the table has the version of the first."""
    script: str
    """An example, or `lm_eval`, `serve` or `chat` for that command line."""
    arguments: tuple[str, ...] = ("MODEL",)
    """Arguments of an example; MODEL, SIGHT and TASKS are replaced by folders."""
    tolerance: float = 1e-4
    """Largest relative difference of a number, due to a different order of fp32 sums over a few steps."""
    copies: int = 1
    """Number of copies of the model, each on the given number of ranks."""


CLIENTS = (
    Client("Trainer", ("transformers",), "train_dp_tp.py", ("MODEL", "COPIES")),
    Client("Trainer, 2 copies", ("transformers",), "train_dp_tp.py", ("MODEL", "COPIES"), copies=2),
    Client("SFT", ("trl", "datasets"), "sft.py", tolerance=1e-3),  # TRL rounds its logs
    Client("SFT with LoRA", ("trl", "datasets"), "sft.py", ("--lora", "MODEL"), 1e-3),
    Client("LoRA, merged", ("peft",), "lora.py"),
    Client("DPO", ("trl", "datasets"), "dpo.py", tolerance=1e-3),
    Client("GRPO", ("trl", "datasets"), "grpo.py", tolerance=1e-3),
    Client("lm_eval, a model", ("lm_eval", "datasets"), "harness.py", ("MODEL", ",".join(TASKS), "TASKS")),
    Client("lm_eval, its own option", ("lm_eval", "datasets"), "lm_eval"),
    Client("pipeline", ("transformers",), "pipelines.py"),
    Client("generate_batch", ("transformers",), "batch.py"),
    Client("serve, openai", ("openai", "fastapi", "uvicorn"), "serve"),
    Client("chat", ("transformers", "rich", "openai", "fastapi", "uvicorn"), "chat"),
    Client("a chat of one's own", ("transformers",), "chat.py"),
    Client("vision", ("transformers",), "vision.py", ("SIGHT", "PICTURE", "w48 w49")),
    Client("a strategy", ("transformers",), "strategy.py"),
    Client("shares", ("transformers",), "shares.py"),
    Client("hooks", ("torch",), "hooks.py"),
    Client("nnsight", ("nnsight",), "lens.py"),
    Client("sentence-transformers", ("sentence_transformers",), "embed.py"),
    Client("accelerate launch", ("accelerate",), "accelerated.py"),
)


@dataclass(frozen=True)
class Inputs:
    """Folders for clients."""

    model: Path
    """A causal language model with a chat template."""
    tasks: Path
    """Tasks of lm_eval, from `write_tasks`."""
    sight: Path | None = None
    """A vision-language model."""
    picture: Path | None = None


def outcome(client: Client, inputs: Inputs, ranks: int) -> str:
    """Run a client on `ranks` ranks, or in one process of plain transformers for 0; returns the lines that it prints.

    Raises ClientError if it fails.
    """
    special: dict[str, Callable[[Inputs, int], str]] = {"lm_eval": _lm_eval, "serve": _serve, "chat": _chat}
    if client.script in special:
        return special[client.script](inputs, ranks)
    given = {
        "COPIES": client.copies if ranks else 1,
        "MODEL": inputs.model,
        "SIGHT": inputs.sight,
        "PICTURE": inputs.picture,
        "TASKS": inputs.tasks,
    }
    program = [str(EXAMPLES / client.script), *(str(given.get(each, each)) for each in client.arguments)]
    said = f"{QUESTION}\n\n" if client.script == "chat.py" else ""
    if not ranks:
        return run([*PYTHON, "benchmarks.alone", *program], said)
    if client.script == "accelerated.py":
        launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(ranks), "--num_machines", "1"]
        return run([*PYTHON, *launch, "--mixed_precision", "no", "--dynamo_backend", "no", *program], ranks=ranks)
    return run([*_torchrun(ranks * client.copies), *program], said, ranks)


def _torchrun(ranks: int) -> list[str]:
    return [*PYTHON, "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def _lm_eval(inputs: Inputs, ranks: int) -> str:
    """Run lm_eval's own command line; returns the rows of its table, without the deviations."""
    model = f"pretrained={inputs.model},dtype=float32" + (",tp_plan=auto" if ranks else "")
    launch = [*_torchrun(ranks), "--local-ranks-filter", "0", "-m", "tp_transformers", "-m"] if ranks else PYTHON
    options = ["--tasks", ",".join(TASKS), "--include_path", str(inputs.tasks), "--batch_size", "2"]
    printed = run([*launch, "lm_eval", "--model", "hf", "--device", "cpu", "--model_args", model, *options], "", ranks)
    return "\n".join(line for line in printed.splitlines() if line.startswith("|"))


def _serve(inputs: Inputs, ranks: int, requests: int = 32) -> str:
    """The answers that the openai client streams, sequentially and concurrently."""
    with _server(inputs.model, ranks) as url:
        return run([sys.executable, str(EXAMPLES / "ask.py"), str(inputs.model), f"{url}/v1", str(requests)])


def _chat(inputs: Inputs, ranks: int) -> str:
    """The answer of `chat` in a terminal."""
    flags = ["max_new_tokens=12", "do_sample=False"]
    said = f"{QUESTION}\nn\n!exit\n"
    if ranks:
        # Its ranks do not print to a terminal.
        printed = run([*PYTHON, "tp_transformers", "chat", str(inputs.model), "-n", str(ranks), *flags], said)
    else:
        with _server(inputs.model, 0) as url:
            printed = run([*PYTHON, "transformers.cli.transformers", "chat", str(inputs.model), url, *flags], said)
    answer = re.search(r">:\s*\n(.*?)\n\d+ tokens in", printed.rpartition(str(inputs.model))[2], re.DOTALL)
    if answer is None:
        raise ClientError(printed)
    return " ".join(answer[1].split())


@contextmanager
def _server(model: Path, ranks: int) -> Iterator[str]:
    """The URL of a running server: this package's, or `transformers serve` for 0 ranks."""
    port = str(free_port())
    ours = ["tp_transformers", "serve", str(model), "-n", str(ranks)]
    command = ours if ranks else ["transformers.cli.transformers", "serve", str(model), "--dtype", "float32"]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = _start([*PYTHON, *command, "--host", "127.0.0.1", "--port", port], log.fileno())
        try:
            deadline = time.monotonic() + TIMEOUT
            while not answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ClientError(f"{' '.join(command)} does not answer")
                time.sleep(0.2)
            yield url
        finally:
            _end(process)
        log.seek(0)
        _check_ranks(command, log.read(), ranks)


def _check_ranks(command: Sequence[str], printed: str, ranks: int) -> None:
    """Raise ClientError unless the load's progress shows that a model was sharded over `ranks` ranks."""
    if ranks > 1 and f"Loading shard 1 of {ranks}" not in printed:
        raise ClientError(f"{' '.join(command)} did not load on {ranks} ranks")


def run(command: Sequence[str], said: str = "", ranks: int = 0) -> str:
    """The stdout of a command with `said` as its input; with `ranks`, it has to load a model on as many ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        process = _start(command, subprocess.PIPE, scratch)
        try:
            printed, errors = process.communicate(said, TIMEOUT)
        except subprocess.TimeoutExpired as expired:
            raise ClientError(f"{' '.join(command)} took more than {TIMEOUT} s") from expired
        finally:
            _end(process)
    if process.returncode:
        raise ClientError(f"{' '.join(command)}\n{printed}\n{errors}")
    _check_ranks(command, errors, ranks)
    return "\n".join(line for line in printed.splitlines() if line and not line.startswith("{"))  # logs of Trainer


def _start(command: Sequence[str], output: int, folder: str | None = None) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    offline = "0" if "chat" in command else "1"  # transformers' chat connects to this machine by the Hub's client
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": offline, "COLUMNS": "400"}
    environment = {**settings, **os.environ, "PYTHONPATH": path}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True, cwd=folder, env=environment,
        start_new_session=True, preexec_fn=end_with_parent,
    )  # fmt: skip


def _end(process: subprocess.Popen[str]) -> None:
    """End a process with the ranks of torchrun, and all other processes of its session."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def difference(one: str, ours: str) -> float:
    """The largest relative difference of the numbers in two texts; infinite if they differ in anything else."""
    number = r"-?\d+\.\d+(?:e[+-]\d+)?"
    if re.sub(number, "#", one) != re.sub(number, "#", ours):
        return float("inf")
    pairs = zip(*(map(float, re.findall(number, text)) for text in (one, ours)), strict=True)
    return max((abs(mine - theirs) / max(abs(theirs), 1e-6) for theirs, mine in pairs), default=0.0)


def main() -> int:
    """Print one row per client; returns 1 if one differs from one process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder (default: that of the demo)")
    parser.add_argument("--sight", type=Path, help="a folder of a model that sees (default: that client is left out)")
    parser.add_argument("--picture", type=Path, help="an image file for it")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="(default: 2 3)")
    parser.add_argument("--only", nargs="+", help="names of clients")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = (arguments.model or prepare()).resolve()
        inputs = Inputs(model, write_tasks(Path(scratch)), arguments.sight, arguments.picture)
        heads = " | ".join(f"{ranks} ranks" for ranks in arguments.ranks)
        print(f"| client | version | one process | {heads} |\n| --- | --- | --- {'| --- ' * len(arguments.ranks)}|")
        wrong = 0
        asked = [each for each in CLIENTS if each.name in (arguments.only or [each.name])]
        for client in asked if inputs.sight else [each for each in asked if "SIGHT" not in each.arguments]:
            one, cells = "", []
            try:
                one = outcome(client, inputs, 0)
                for ranks in arguments.ranks:
                    started = time.perf_counter()
                    found = difference(one, outcome(client, inputs, ranks))
                    seconds = time.perf_counter() - started
                    cells.append(f"{f'{found:.0e}' if found else 'the same'}, {seconds:.0f} s")
                    wrong += found > client.tolerance
            except ClientError as error:
                print(error, file=sys.stderr)
                cells.append("failed")
                wrong += 1
            shown = " ".join(one.split()).replace("|", "\\|")[:120]
            version = f"{client.modules[0]} {metadata.version(client.modules[0])}"
            print(f"| {client.name} | {version} | {shown} | {' | '.join(cells)} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
