"""Every example, and every client that needs none, prints on 2 ranks what one process prints."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers

from benchmarks.clients import CLIENTS, EXAMPLES, ROOT, ClientError, Inputs, difference, outcome, run
from benchmarks.tasks import write_tasks
from tests.support import commands, processors
from tests.support.pool import free_port

slow = [pytest.mark.distributed, pytest.mark.slow]

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }} {% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def inputs(small_smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("examples")
    processors.image().save(folder / "picture.png")
    sight = write_sight(folder / "sight")
    return Inputs(small_smollm2, write_tasks(folder / "tasks"), sight, folder / "picture.png")


def write_sight(folder: Path) -> Path:
    """A small LLaVA with its processor."""
    family = processors.FAMILIES["llava"]
    config = family.config()
    size = config.vision_config.image_size
    words = processors.tokenizer(family.special, {"image_token": config.image_token_index})
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size}),
        words,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )
    family.model().float().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("client", [pytest.param(each, id=each.name, marks=slow) for each in CLIENTS])
def test_ranks_print_what_one_process_prints(client, inputs) -> None:
    missing = [name for name in client.modules if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    one = outcome(client, inputs, 0)
    ours = outcome(client, inputs, 2)
    assert one
    assert difference(one, ours) <= client.tolerance, f"one process: {one}\n2 ranks: {ours}"


@pytest.mark.slow
def test_two_nodes_by_slurm(inputs, tmp_path) -> None:
    """Commands of SLURM that start both nodes on this machine."""
    commands = {
        "scontrol": "echo 127.0.0.1",
        "srun": '"$@" & first=$!; "$@" && wait $first',
        "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_ID": "7",
        "PORT": str(free_port()),
    }
    command = ["sh", str(EXAMPLES / "slurm.sh"), str(EXAMPLES / "hooks.py"), str(inputs.model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    hooks = next(client for client in CLIENTS if client.script == "hooks.py")
    assert difference(outcome(hooks, inputs, 0), done.stdout.strip()) <= hooks.tolerance


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(tmp_path) -> None:
    """Its cells in order, in a fresh kernel; numbers may be others."""
    client, notebooks = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = notebooks.read(EXAMPLES / "notebook.ipynb", 4)
    shown = [printed(cell) for cell in notebook.cells]
    assert any(shown)
    runner = client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    runner.execute(env=commands.environment(tmp_path))
    assert [printed(cell) for cell in notebook.cells] == shown


def printed(cell: dict[str, Any]) -> str:
    """The stdout of a cell on one line, since its width is that of a terminal, with `0` for every number."""
    outputs = [each for each in cell.get("outputs", []) if each.get("name") == "stdout"]
    return " ".join(re.sub(r"\d[\d.,]*", "0", "".join("".join(each["text"]) for each in outputs)).split())


def test_examples_are_short_and_named() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for example in EXAMPLES.iterdir():
        if example.suffix in (".py", ".sh", ".yaml"):
            assert len(example.read_text(encoding="utf-8").splitlines()) <= 60, example.name
        if example.suffix in (".py", ".sh", ".yaml", ".ipynb"):
            assert f"[{example.name}]({example.name})" in page, example.name
    others = {"ask.py", "ray_actors.py", "ray_train.py"}  # by `serve` of CLIENTS, and by tests of clusters
    assert {client.script for client in CLIENTS} >= {each.name for each in EXAMPLES.glob("*.py")} - others


def test_texts_are_compared_by_their_numbers() -> None:
    assert difference("losses 2.0 4.0e-1", "losses 2.0 4.4e-1") == pytest.approx(0.1)
    assert difference("answer 'a dog' 1.5", "answer 'a cat' 1.5") == float("inf")


def test_a_client_that_runs_on_fewer_ranks_is_an_error() -> None:
    with pytest.raises(ClientError, match="did not load on 2 ranks"):
        run([sys.executable, "-c", "print('losses 1.0')"], ranks=2)
