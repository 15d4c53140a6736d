"""Every code block of every page, run as it stands by 2 ranks or a shell; printed text is compared, digits aside."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import GPTJConfig, LlamaConfig, Qwen3Config

from tests.support import commands
from tests.support.hub_server import HubServer
from tests.support.readme import PAGES, ROOT, Block, blocks, called

pytestmark = pytest.mark.slow

TIMEOUT = 900
SESSION_TIMEOUT = 900
"""Seconds that all blocks of Python may take together."""
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""The shapes of Llama 3 with 70 billion parameters."""
QWEN3_32B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
}
"""The shapes of Qwen3 with 32 billion parameters, in 4 bits."""
HELPED: set[str] = set()
"""Benchmarks that have printed how they are called."""

RUN_PAGES = """
import contextlib, gc, io, json, os
import tp_transformers

printed = {}
for page, folder, blocks in json.load(open("pages.json")):
    os.chdir(folder)
    names = {}
    for line, code in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(compile("\\n" * line + code, page, "exec"), names)
        printed[f"{page}:{line}"] = stdout.getvalue()
    tp_transformers.disable()
    names.clear()
    gc.collect()
if os.environ["RANK"] == "0":
    json.dump(printed, open(os.environ["PRINTED"], "w"))
"""
"""Runs page after page, each with names and a folder of its own; a traceback shows the page and its line."""


@pytest.fixture(scope="module")
def here(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a page, as the page assumes it: its scripts, and models and a text under `path/to`."""
    here = tmp_path_factory.mktemp("pages")
    models = here / "path" / "to"
    models.mkdir(parents=True)
    (models / "SmolLM2-135M-Instruct").symlink_to(smollm2)
    GPTJConfig().save_pretrained(models / "gpt-j-6b")
    LlamaConfig(**LLAMA_70B).save_pretrained(models / "llama-70b")
    Qwen3Config(**QWEN3_32B).save_pretrained(models / "qwen3-32b-awq")
    book = (ROOT / "tests" / "data" / "alice.txt").read_text()
    (models / "text.txt").write_text(book[:2000])
    for page in PAGES:
        folder = folder_of(page, here)
        folder.mkdir()
        (folder / "path").symlink_to(here / "path")
        for block in blocks(page):
            if block.file:
                (folder / block.file).write_text(block.code)
    return here


def folder_of(page: Path, here: Path) -> Path:
    """The folder in which the blocks of a page run."""
    return here / called(page).removesuffix(".md").replace("/", "-")


@pytest.fixture(scope="module")
def environment(here: Path, smollm2: Path) -> Iterator[dict[str, str]]:
    """The variables of the commands, for which two names of the model are on a Hub of their own."""
    with HubServer() as hub:
        hub.add("org/model", smollm2)
        hub.add("HuggingFaceTB/SmolLM2-135M-Instruct", smollm2)
        yield {
            **commands.environment(here),
            "COLUMNS": "120",
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(here / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }


def run(command: str | list[str], folder: Path, environment: dict[str, str], timeout: float = TIMEOUT) -> str:
    """The output of a command; fails with all that it printed unless it succeeds."""
    done = subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
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
    assert re.search(pattern, text), f"{expected.place}:\n{expected_text}\nprinted:\n{text}"


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_blocks_have_a_language_and_scripts_are_run(page) -> None:
    found = blocks(page)
    assert {block.language for block in found} <= {"python", "py", "sh", "yaml", "text", ""}
    shell = "".join(block.code for block in found if block.language == "sh")
    assert all(block.file in shell for block in found if block.file)


def test_the_python(here, environment) -> None:
    """One start of torchrun for all pages."""
    session = [
        (
            str(page),
            str(folder_of(page, here)),
            [(block.line, block.code) for block in blocks(page) if block.language == "python" and not block.file],
        )
        for page in PAGES
    ]
    (here / "pages.json").write_text(json.dumps(session))
    (here / "run_pages.py").write_text(RUN_PAGES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "run_pages.py"]
    run(torchrun, here, {**environment, "PRINTED": str(here / "printed.json")}, SESSION_TIMEOUT)
    printed = json.loads((here / "printed.json").read_text())
    assert len(printed) == sum(len(python) for _, _, python in session) > 10
    for page in PAGES:
        for block, text in pairwise(blocks(page)):
            if f"{page}:{block.line}" in printed and text.language == "text":
                assert_printed(text, printed[f"{page}:{block.line}"])


def shell_blocks() -> list[tuple[Block, Block | None]]:
    """The blocks of shell, each with the text that follows it."""
    return [
        (block, text if text and text.language == "text" else None)
        for page in PAGES
        for block, text in pairwise([*blocks(page), None])
        if block and block.language == "sh"
    ]


@pytest.mark.parametrize(("block", "text"), shell_blocks(), ids=lambda block: block.place if block else "")
def test_the_shell(block, text, here, environment) -> None:
    printed, folder = "", folder_of(block.page, here)
    for line in block.code.replace("\\\n", "").splitlines():
        command = line.split("  #")[0].strip()
        if command.startswith("#") or not command:
            continue
        if command.startswith("curl "):  # test_serve.py and test_examples.py ask the server
            continue
        if command.startswith("tp-transformers serve "):  # it ends by a signal
            run("tp-transformers serve --help", folder, environment)
        elif command.startswith("git clone "):
            run(re.sub(r"https://\S+", f"{ROOT} tp_transformers", command), folder, environment)
        elif "--nnodes 2" in command:
            printed += run(two_nodes(command), folder, environment)
        elif command.startswith("make "):
            targets = [word for word in shlex.split(command, comments=True)[1:] if "=" not in word]
            run(["make", "-n", *targets], ROOT, environment)  # a Makefile's own environment takes minutes to make
            if "demo" in targets:
                model = here / "path" / "to" / "SmolLM2-135M-Instruct"
                printed += run(f"python -m benchmarks.demo --ranks 2 --folder {model}", ROOT, environment)
        elif command.startswith("pip install "):
            install = f"{sys.executable} -m {command} --dry-run --no-deps --no-build-isolation --no-index"
            run(install, ROOT, environment)
        elif benchmark := re.search(r"-m (benchmarks(?:\.| )\w+)", command):
            if benchmark[1] not in HELPED:  # each has tests of its own
                run(f"python -m {benchmark[1]} --help", ROOT, environment)
                HELPED.add(benchmark[1])
        else:
            printed += run(command, folder, environment)
    if text is not None:
        assert_printed(text, printed)


def two_nodes(command: str) -> str:
    """The launch of two nodes, as two launches of one rank each on this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = command.replace("host0:29500", f"127.0.0.1:{port}").replace("--nproc-per-node 8", "--nproc-per-node 1")
    return f"{command} & first=$!; {command} & wait $! && wait $first"
