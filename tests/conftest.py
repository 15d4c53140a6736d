"""What the tests share: the pool of ranks, and checkpoints made once a session."""

from __future__ import annotations

import ast
import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

from benchmarks import demo
from tests.support import cores
from tests.support.architectures import ARCHITECTURES
from tests.support.architectures import make_case as make_architecture
from tests.support.commands import main
from tests.support.models import Case, make_case
from tests.support.needs import lacking
from tests.support.pool import Pool, wait_for_no_disk
from tp_transformers.seams import features

logging.disable_progress_bar()
torch.set_num_threads(1)  # the ranks of the pool need the other cores
cores.take_own()
wait_for_no_disk()
# torch asks for the name of each peer of a store: a name server that loses the question costs a second instead of 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# How fast a machine draws examples says nothing about the code. The quick tests draw the same examples in each run, so
# that a change alone can break them; all tests (MATRIX=1) draw new ones.
settings.register_profile(
    "quick",
    deadline=None,
    max_examples=100 if "MATRIX" in os.environ else 50,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="MATRIX" not in os.environ,
    database=None,
)
settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the tests of a feature that is not there, and those that need it."""
    return True if collection_path.suffix == ".py" and lacking(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of ranks by their folder; leave out those that need a feature which is not there."""
    there: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        if {"distributed", "gpu"} & {*item.nodeid.partition("::")[0].split("/")}:
            item.add_marker("distributed")
        names = {name for mark in item.iter_markers("needs") for name in mark.args}
        there[names <= features().keys()].append(item)
    config.hook.pytest_deselected(items=there[False])
    items[:] = there[True]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for distributed cases."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory):
    """`cases(heads, kv_heads, **config)` is a tiny Llama checkpoint with its one-process reference, made once."""
    made: dict[object, Case] = {}

    def make(heads: int, kv_heads: int, **config: object) -> Case:
        key = (heads, kv_heads, tuple(sorted(config.items())))
        if key not in made:
            folder: Path = tmp_path_factory.mktemp(f"llama-{heads}-{kv_heads}")
            made[key] = make_case(folder, heads, kv_heads, **config)
        return made[key]

    return make


@pytest.fixture
def size(request: pytest.FixtureRequest) -> int:
    """Ranks of a test `on_ranks`, where no parametrization says."""
    return int(request.function.on_ranks["size"])


@pytest.fixture
def heads(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Query and KV heads of the model of such a test."""
    query_heads, kv_heads = request.function.on_ranks["heads"]
    return query_heads, kv_heads


@pytest.fixture
def folder(request: pytest.FixtureRequest, cases, tmp_path: Path, heads: tuple[int, int]) -> str:
    """The checkpoint of such a test: a tiny Llama, or another architecture."""
    options = request.function.on_ranks
    if options["model"] is None:
        return cases(*heads, **options["config"]).folder
    ARCHITECTURES[options["model"]].make(*heads).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    """`printed(*arguments, code=0)` is the output of `tp-transformers`; of an error, code 2, that on stderr alone."""

    def run(*arguments: str, code: int = 0) -> str:
        assert main([*arguments]) == code
        captured = capsys.readouterr()
        assert code != 2 or captured.out == ""
        return captured.err if code == 2 else captured.out

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """`made(name, variant)` is a tiny checkpoint of an architecture with its one-process reference, made once."""
    return cache(lambda name, variant: make_architecture(tmp_path_factory.mktemp("case"), name, *variant))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct with its tokenizer, in fp32 and several files."""
    return demo.prepare(tmp_path_factory.mktemp("smollm2") / "checkpoint")


@pytest.fixture(scope="session")
def small_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's 9 query and 3 KV heads, its words and its chat, in a model with random weights that takes no time."""
    folder = tmp_path_factory.mktemp("small-smollm2")
    sizes = {"num_hidden_layers": 2, "hidden_size": 144, "head_dim": 16, "intermediate_size": 200}
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(smollm2, **sizes, initializer_range=0.2, tie_word_embeddings=False)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def matrix_summary(pytestconfig: pytest.Config) -> list[Any]:
    """Where cases of the matrix put (architecture, variant, ranks, worst errors), for the summary at the end."""
    return pytestconfig.stash.setdefault(_SUMMARY, [])


def pytest_collection_finish() -> None:
    """What is imported stays; collecting the rest is then cheap."""
    gc.freeze()


_NO_GROUPED_PRODUCTS = "Could not run 'aten::_grouped_mm' with arguments from the 'CPU' backend"
"""What torch 2.8 raises where an old transformers multiplies experts, in one process as on ranks."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Skip experts that neither side can multiply, since torch lacks the operator that transformers calls."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    is_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
    if report.failed and is_old and call.excinfo is not None and _NO_GROUPED_PRODUCTS in str(call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {_NO_GROUPED_PRODUCTS}")


_SUMMARY: pytest.StashKey[list[Any]] = pytest.StashKey()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of a parallel run sends its cases of the matrix to the one that prints the summary."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["matrix"] = repr(session.config.stash.get(_SUMMARY, []))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect what such a process has sent."""
    rows = node.config.stash.setdefault(_SUMMARY, [])
    rows += ast.literal_eval(getattr(node, "workeroutput", {}).get("matrix", "[]"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line an architecture: how many cases passed, and the worst of each number."""
    rows: dict[str, list[Any]] = {}
    for name, variant, size, worst in terminalreporter.config.stash.get(_SUMMARY, []):
        rows.setdefault(name, []).append((variant, size, worst))
    if rows:
        terminalreporter.section("worst relative error of every architecture, and share of one of 2 ranks")
    for name, cases in rows.items():
        logits, grads = (max(worst[key] for _, _, worst in cases) for key in ("logits", "grads"))
        shares = [worst["share"] for variant, size, worst in cases if size == 2 and variant[0] == 8]
        numbers = f"logits {logits:.1e}   gradients {grads:.1e}   share {max(shares, default=0):.3f}"
        terminalreporter.write_line(f"{name:24} {len(cases):3} cases   {numbers}")


def pytest_report_header() -> str:
    """Which versions a run is of."""
    return f"torch {torch.__version__}, transformers {transformers.__version__}"
