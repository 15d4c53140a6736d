"""Every block of code in the README, run as it stands there by 2 ranks or a shell; and what it prints, digits aside."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import GPTJConfig

from tests.support.hub_server import HubServer
from tests.support.readme import Block, blocks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TIMEOUT = 240
HELPED: set[str] = set()
"""Benchmarks that have printed how they are called."""

RUN_BLOCKS = """
import contextlib, io, json, os, sys
import tp_transformers
from transformers import AutoModelForCausalLM

tp_transformers.enable()
names = {"tp_transformers": tp_transformers, "AutoModelForCausalLM": AutoModelForCausalLM}
names["folder"] = "path/to/SmolLM2-135M-Instruct"
printed = {}
for line, code in json.load(open("blocks.json")):
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        exec(compile("\\n" * line + code, "README.md", "exec"), names)
    printed[line] = stdout.getvalue()
if os.environ["RANK"] == "0":
    json.dump(printed, open("printed.json", "w"))
"""
"""Runs the blocks of Python in one session, since they speak of one model."""


@pytest.fixture(scope="module")
def here(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README assumes it: its scripts, the model under `path/to`."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "SmolLM2-135M-Instruct").symlink_to(smollm2)
    GPTJConfig().save_pretrained(folder / "path" / "to" / "gpt-j-6b")
    book = (ROOT / "tests" / "data" / "alice.txt").read_text()
    (folder / "path" / "to" / "text.txt").write_text(book[:2000])
    for block in blocks():
        if block.file:
            (folder / block.file).write_text(block.code)
    unedited = (folder / "generate.py").read_text().replace("tp_transformers.enable()\n", "")
    (folder / "script.py").write_text(unedited)
    return folder


@pytest.fixture(scope="module")
def environment(here: Path, smollm2: Path) -> Iterator[dict[str, str]]:
    """Where `org/model` is, on a Hub of its own."""
    with HubServer() as hub:
        hub.add("org/model", smollm2)
        yield {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(here / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }


def run(command: str | list[str], here: Path, environment: dict[str, str]) -> str:
    """What a command prints. Fails with all that it said unless it succeeds."""
    done = subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def assert_printed(expected: Block, printed: str) -> None:
    """Every `[...]` stands for anything, every number for any other, and lines may be wrapped."""
    expected_text, text = (
        " ".join(re.sub(r"\d[\d.]*(e[+-]\d+)?", "0", text).split()) for text in (expected.code, printed)
    )
    pattern = ".*".join(map(re.escape, re.split(r" ?\[\.\.\.\]", expected_text)))
    assert re.search(pattern, text), f"README.md line {expected.line}:\n{expected_text}\nprinted:\n{text}"


def test_every_block_has_a_language() -> None:
    assert {block.language for block in blocks()} <= {"python", "sh", "yaml", "text"}


def test_every_script_is_run() -> None:
    shell = "".join(block.code for block in blocks() if block.language == "sh")
    assert all(block.file in shell for block in blocks() if block.file)


def test_the_python(here: Path, environment: dict[str, str]) -> None:
    found = blocks()
    python = [(block.line, block.code) for block in found if block.language == "python" and not block.file]
    (here / "blocks.json").write_text(json.dumps(python))
    (here / "run_blocks.py").write_text(RUN_BLOCKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "run_blocks.py"]
    run(torchrun, here, environment)
    printed = json.loads((here / "printed.json").read_text())
    assert len(printed) == len(python) > 3
    for block, text in pairwise(found):
        if str(block.line) in printed and text.language == "text":
            assert_printed(text, printed[str(block.line)])


def commands() -> list[tuple[Block, Block | None]]:
    """The blocks of shell, each with the text that follows it."""
    found = [*blocks(), None]
    return [
        (block, text if text and text.language == "text" else None)
        for block, text in pairwise(found)
        if block and block.language == "sh"
    ]


@pytest.mark.parametrize(("block", "text"), commands(), ids=lambda block: f"line {block.line}" if block else "")
def test_the_shell(block: Block, text: Block | None, here: Path, environment: dict[str, str]) -> None:
    printed = ""
    for line in block.code.splitlines():
        command = line.split("    #")[0].strip()
        if command.startswith("#") or not command:
            continue
        if "--nnodes 2" in command:
            run(two_nodes(command), here, environment)
        elif command.startswith("make "):
            target = shlex.split(command)[1]
            run(["make", "-n", target], ROOT, environment)  # a Makefile's own environment takes minutes to make
            if target == "demo":
                demo = "python -m benchmarks.demo --ranks 2 --folder path/to/SmolLM2-135M-Instruct"
                printed += run(demo, here, environment)
        elif command.startswith("pip install "):
            install = f"{sys.executable} -m {command} --dry-run --no-deps --no-build-isolation --no-index"
            run(install, ROOT, environment)
        elif benchmark := re.search(r"-m (benchmarks\.\w+)", command):
            if benchmark[1] not in HELPED:  # each has tests of its own
                run(f"python -m {benchmark[1]} --help", ROOT, environment)
                HELPED.add(benchmark[1])
        else:
            printed += run(command, here, environment)
    if text is not None:
        assert_printed(text, printed)


def two_nodes(command: str) -> str:
    """The launch of two nodes, as two launches of one rank each on this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = command.replace("host0:29500", f"127.0.0.1:{port}").replace("--nproc-per-node 8", "--nproc-per-node 1")
    return f"{command} & first=$!; {command} & wait $! && wait $first"
