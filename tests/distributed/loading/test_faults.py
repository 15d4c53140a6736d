"""Faults in the middle of a load stop all ranks; slow ranks do not."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import signal
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModel, PreTrainedModel

import tp_transformers
from tests.support.comparisons import equal_parameters
from tests.support.models import edited, load
from tests.support.pool import WorkerError
from tests.support.tiers import wide
from tp_transformers.checkpoint.reading import reader
from tp_transformers.checkpoint.reading.local_file import LocalFile
from tp_transformers.checkpoint.saving.writer import Writer
from tp_transformers.features.machines import sameness
from tp_transformers.features.page_cache import prefetch
from tp_transformers.features.presharded import save
from tp_transformers.features.presharded.save import SummedWriter
from tp_transformers.features.watch import calls
from tp_transformers.loading import load as loader
from tp_transformers.loading import memory, request
from tp_transformers.loading.storage import Encoding
from tp_transformers.plans import Plan
from tp_transformers.ranks import group as group_module
from tp_transformers.slices.lazy import Resident


def descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # a thread has closed it
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def load_with(fault: str, rank: int, folder: str) -> None:
    """Load, while `fault` happens on one rank; what is left open or running afterwards is told by another error."""
    own = int(os.environ["RANK"])
    undo = (_FAULTS if own == rank else _ELSEWHERE).get(fault, lambda _: lambda: None)(Path(folder))
    try:
        load(folder, tp_map=False)
    finally:
        undo()
        gc.collect()
        left = [path for path in descriptors() if path.startswith(folder)]
        running = [thread.name for thread in threading.enumerate() if thread.name.startswith(("read", "prefetch"))]
        assert not left, left
        assert not running, running


def patched(owner: Any, name: str, replacement: Any) -> Any:
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    return lambda: setattr(owner, name, before)


def io_error(folder: Path) -> Any:
    calls, preadv = [0], os.preadv  # two calls a file for the headers

    def later(fd: int, *arguments: Any) -> int:
        calls[0] += 1
        if calls[0] > 16:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, *arguments)

    return patched(os, "preadv", later)


def io_error_in_the_header(folder: Path) -> Any:
    def failing(fd: int, *arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    return patched(os, "preadv", failing)


def short_read(folder: Path) -> Any:
    """The file ends early, after its header was read."""
    run = reader._run

    def truncating(*arguments: Any) -> None:
        for path in folder.glob("*.safetensors"):
            os.truncate(path, path.stat().st_size // 2)
        run(*arguments)

    return patched(reader, "_run", truncating)


def short_read_elsewhere(folder: Path) -> Any:
    """Read after the other rank has truncated the files: a rank that is just copying mapped bytes ends (SIGBUS)."""
    run, sizes = reader._run, {path: path.stat().st_size for path in folder.glob("*.safetensors")}

    def waiting(*arguments: Any) -> None:
        while any(path.stat().st_size == size for path, size in sizes.items()):
            time.sleep(0.01)
        run(*arguments)

    return patched(reader, "_run", waiting)


def replaced(folder: Path) -> Any:
    run = reader._run

    def replacing(*arguments: Any) -> None:
        run(*arguments)
        for path in folder.glob("*.safetensors"):
            shutil.copy(path, folder / "new")
            (folder / "new").replace(path)

    return patched(reader, "_run", replacing)


_FAULTS = {
    "io_error_in_the_header": io_error_in_the_header,
    "io_error": io_error,
    "short_read": short_read,
    "replaced": replaced,
}
_ELSEWHERE = {"short_read": short_read_elsewhere}
"""Changes on the other rank."""


@pytest.mark.parametrize("rank", wide([1, 0], 1))
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("io_error_in_the_header", "Input/output error"),
        ("io_error", r"reading at byte \d+ failed: Input/output error"),
        ("short_read", "truncated|end of the file|got another file"),
        ("replaced", "got another file, or other contents"),
    ],
)
def test_a_fault_in_the_middle_stops_all_ranks(pool, cases, tmp_path, fault, says, rank) -> None:
    folder = shutil.copytree(cases(9, 3).folder, tmp_path / "model")
    with pytest.raises(WorkerError) as caught:
        pool.run(2, load_with, fault, rank, str(folder), timeout=60)
    errors = caught.value.errors
    assert len(errors) == 2
    for text in errors.values():
        assert text.startswith("CheckpointError")
        assert re.search(says, text), text
        assert ".safetensors" in text


def fail_and_count_hooks(folder: str) -> None:
    """Run on every rank: hooks that every module of the process passes, before a load that fails and after it."""
    hooks = torch.nn.modules.module._global_module_registration_hooks
    gc.collect()
    before = len(hooks)
    with suppress(tp_transformers.CheckpointError):
        load_with("io_error", 1, folder)
    gc.collect()
    assert len(hooks) == before


def test_a_load_that_fails_leaves_no_model(pool, cases, tmp_path) -> None:
    """An error that something keeps would keep the frames of the load, and what they have loaded."""
    pool.run(2, fail_and_count_hooks, str(shutil.copytree(cases(9, 3).folder, tmp_path / "model")))


def die(folder: str) -> None:
    def dying(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1":
        reader._run = dying
    load(folder)


def test_the_others_say_that_a_rank_has_ended(pool, cases) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(2, die, cases(9, 3).folder, timeout=60)
    assert caught.value.errors[0].startswith("RemoteRankError: rank 1 gave no sign of life")
    assert caught.value.errors[1].startswith("Died")


def initialise(folder: str, rank: int) -> None:
    """Load a checkpoint without a head, whose initialisation fails on one rank."""

    def failing(self: Any, module: Any) -> None:
        raise RuntimeError("no memory for the head")

    undo = patched(PreTrainedModel, "_init_weights", failing) if int(os.environ["RANK"]) == rank else (lambda: None)
    try:
        load(folder)
    finally:
        undo()


@pytest.mark.parametrize("rank", wide([0, 1], 1))
def test_an_initialisation_that_fails_on_one_rank_stops_the_others(pool, cases, tmp_path, rank) -> None:
    """The others would wait for its part in the broadcast of what is initialised."""
    AutoModel.from_pretrained(cases(9, 3).folder).save_pretrained(tmp_path)
    with pytest.raises(WorkerError) as caught:
        pool.run(2, initialise, str(tmp_path), rank)
    expected = f"RemoteRankError: rank {rank}: RuntimeError: no memory for the head"
    assert caught.value.errors == {0: expected, 1: expected}


class UnprintableError(Exception):
    """An error of another library that cannot even say what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")


STEPS = (
    (Plan, "as_dict"),  # before ranks compare plans
    (Encoding, "read_first"),
    (memory, "Holding"),
    (sameness, "_compare"),
    (prefetch, "prefetching"),
    (memory, "read_together"),
    (loader, "same_bytes"),  # of tied parameters that the checkpoint holds twice
    (loader, "place"),
    (loader, "LoadReport"),
    (PreTrainedModel, "initialize_weights"),
    (Resident, "materialize"),  # of what transformers has initialised
    (calls, "load_watched"),
)
"""Functions in which a rank fails, between the votes of a load."""


def fail_in_each_step(folder: str, rank: int) -> list[str]:
    """Run on every rank: what loads raise of which each fails in another step on one rank alone."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    said = []
    for owner, name in STEPS:
        error = UnprintableError() if owner is PreTrainedModel else ValueError(f"in {name}")
        with ExitStack() as stack:
            if int(os.environ["RANK"]) == rank:
                stack.enter_context(mock.patch.object(owner, name, side_effect=error))
            try:
                load(folder)
            except Exception as raised:
                said.append(f"{type(raised).__name__}: {raised}")
    return [*said, str(load(folder).tp_group.gather("and then it loads"))]


@pytest.mark.slow
def test_a_rank_that_fails_between_votes_stops_all(pool, cases, tmp_path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        del tensors["model.layers.1.mlp.up_proj.weight"]

    folder = edited(cases(8, 4, tie_word_embeddings=True).folder, tmp_path / "model", change)
    texts = [f"ValueError: in {name}" for _, name in STEPS]
    texts[STEPS.index((PreTrainedModel, "initialize_weights"))] = (
        "UnprintableError: (without a message: its str() fails)"
    )
    expected = [*(f"RemoteRankError: rank 1: {text}" for text in texts), str(["and then it loads"] * 3)]
    for found in pool.run(3, fail_in_each_step, folder, 1, timeout=100):
        assert found == expected


# -- what is slow


def slowly(owner: Any, name: str, rank: int, seen: list[str]) -> Any:
    """Let the first call of a function take longer than a collective may, on one rank."""
    original = getattr(owner, name)

    def slow(*arguments: Any, **named: Any) -> Any:
        if int(os.environ["RANK"]) == rank and name not in seen:
            seen.append(name)
            time.sleep(2.5)
        return original(*arguments, **named)

    return mock.patch.object(owner, name, slow)


def in_a_hurry(folder: str, to: str, rank: int) -> tuple[set[str], set[str]]:
    """Load and save with collectives that give up after 2 seconds, while one rank is slow in all that it does."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    seen: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(group_module, "HEARTBEAT", 0.3))
        for owner, name in (
            (request, "open_checkpoint"),
            (prefetch, "fetch"),
            (reader, "_run"),
            (LocalFile, "check_unchanged"),
            (SummedWriter, "write_all"),
            (save, "check_save"),
            (Writer, "write"),
            (Writer, "finish"),
        ):
            stack.enter_context(slowly(owner, name, rank, seen))
        model = load(folder, tp_prefetch=True)
        tp_transformers.save_sharded(model, to + "/sharded")
        before = set(seen)
        seen.clear()
        model.save_pretrained(to + "/whole")
    assert all(equal_parameters(model, load(f"{to}/{name}")) for name in ("sharded", "whole"))
    return before, set(seen)


@pytest.mark.slow
@pytest.mark.parametrize("rank", wide([0, 1], 1))
def test_ranks_wait_longer_than_a_collective_may(pool, cases, tmp_path, rank) -> None:
    seen = pool.run(2, in_a_hurry, cases(9, 3).folder, str(tmp_path), rank, timeout=120)
    assert seen[1 - rank] == (set(), set())
    of_all = {"open_checkpoint", "fetch", "_run", "check_unchanged", "write_all", "write", "finish"}
    assert seen[rank] == ((of_all | {"check_save"}, {"write", "finish"}) if rank == 0 else (of_all, set()))
