"""What a load does besides giving the right values: cold caches, reports, and faults in the middle of it."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import tp_transformers
from tests.support.models import MASK, PROMPTS, bytes_read, headers, held, relative
from tests.support.pool import WorkerError
from tests.support.tiers import wide
from tp_transformers.checkpoint.reading import prefetch, reader
from tp_transformers.checkpoint.reading.file_map import FileMap
from tp_transformers.checkpoint.reading.local_file import LocalFile
from tp_transformers.checkpoint.saving import sharded
from tp_transformers.checkpoint.saving.writer import SummedWriter, Writer
from tp_transformers.loading import load as loader
from tp_transformers.ranks import group as group_module

pytestmark = pytest.mark.distributed


def load(folder: str, **arguments: Any) -> Any:
    with tp_transformers.enable():
        return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", **arguments)


# -- what is reported


def report(folder: str, how: bool | None, evict: bool) -> dict[str, Any]:
    if evict:
        for path in Path(folder).glob("*.safetensors"):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    model = load(folder, tp_prefetch=how)
    with torch.no_grad():
        logits = model(PROMPTS, attention_mask=MASK).logits
    report = model.tp_report
    return {
        "report": report,
        "read": bytes_read(model),
        "text": str(report),
        "held": held(model),
        "headers": headers(folder),
        "logits": logits,
    }


def stored_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) - headers(folder)


def error_of(rank: dict[str, Any], reference: str) -> float:
    return relative(rank["logits"], torch.load(reference)["logits"])


@pytest.mark.parametrize("size", wide([3, 2], 1))
def test_the_report_adds_up(pool: Any, cases: Any, size: int) -> None:
    case = cases(9, 3)
    ranks = pool.run(size, report, case.folder, False, False)
    for index, rank in enumerate(ranks):
        found = rank["report"]
        assert found.rank == index
        assert found.shares == tuple(other["held"] for other in ranks)
        assert found.share == rank["held"]
        assert sum(nbytes for nbytes, _, _ in found.methods.values()) == rank["held"]
        assert sum(copied for _, copied, _ in found.methods.values()) == found.bytes_read - rank["headers"]
        assert found.reads >= len(found.methods)
        assert 0 < found.reading_seconds <= found.seconds
        assert found.prefetched == 0
        assert found.fallbacks == ()
        assert f"rank {index} of {size}" in rank["text"]


@pytest.mark.parametrize("evict", [False, True])
def test_the_ranks_of_a_node_fill_a_cold_cache_together(
    pool: Any, cases: Any, tmp_path: Path, evict: bool, monkeypatch: Any
) -> None:
    """Each byte once, whichever ranks need it; what they read then is in the cache, so that maps can be used."""
    case = cases(9, 3)
    folder = shutil.copytree(case.folder, tmp_path / "cold")
    ranks = pool.run(3, report, str(folder), True, evict)
    assert sum(rank["report"].prefetched for rank in ranks) == stored_bytes(str(folder))
    for rank in ranks:
        assert rank["read"] - rank["headers"] == rank["held"], "as from a warm cache"
        assert error_of(rank, case.reference) < 1e-4


def small_blocks(folder: str) -> dict[str, Any]:
    undo = patched(prefetch, "BLOCK_BYTES", 1000)
    try:
        return report(folder, True, True)
    finally:
        undo()


def test_blocks_are_shared_out(pool: Any, cases: Any) -> None:
    case = cases(9, 3)
    ranks = pool.run(3, small_blocks, case.folder)
    total = stored_bytes(case.folder)
    assert sum(rank["report"].prefetched for rank in ranks) == total
    assert all(abs(rank["report"].prefetched - total / 3) < 0.1 * total for rank in ranks)


def one_page_missing(folder: str) -> dict[str, Any]:
    """A page of the third block of each file seems to be on disk only."""
    resident = LocalFile.is_resident

    def seeming(self: LocalFile, spans: Any) -> bool:
        spans = list(spans)
        return resident(self, spans) and not any(start <= 3500 < stop for start, stop in spans)

    undo = [patched(prefetch, "BLOCK_BYTES", 1000), patched(LocalFile, "is_resident", seeming)]
    try:
        return report(folder, None, False)
    finally:
        for each in undo:
            each()


def test_only_the_blocks_that_are_missing_are_fetched(pool: Any, cases: Any) -> None:
    case = cases(9, 3)
    ranks = pool.run(2, one_page_missing, case.folder)
    files = len(list(Path(case.folder).glob("*.safetensors")))
    assert 0 < sum(rank["report"].prefetched for rank in ranks) <= 1000 * files
    assert all(error_of(rank, case.reference) < 1e-4 for rank in ranks)


def short_of_memory(folder: str) -> dict[str, Any]:
    undo = patched(prefetch, "_available_memory", lambda: 1000)
    try:
        return report(folder, True, False)
    finally:
        undo()


def test_a_cache_without_room_is_left_alone(pool: Any, cases: Any) -> None:
    case = cases(9, 3)
    for rank in pool.run(2, short_of_memory, case.folder):
        assert rank["report"].prefetched == 0
        assert error_of(rank, case.reference) < 1e-4


def on_nodes_of_their_own(folder: str, how: list[bool | None]) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    undo = patched(prefetch, "node_name", lambda: f"node {rank}")
    try:
        return report(folder, how[rank], False)
    finally:
        undo()


@pytest.mark.parametrize("how", [[None, True], [True, False]], ids=str)
def test_a_cold_node_beside_one_that_is_not(pool: Any, cases: Any, how: list[bool | None]) -> None:
    """Nodes decide for themselves whether they fill their caches, and still meet in the same collectives."""
    case = cases(9, 3)
    ranks = pool.run(2, on_nodes_of_their_own, case.folder, how)
    for wanted, rank in zip(how, ranks, strict=True):
        assert (rank["report"].prefetched > 0) == bool(wanted)
        assert error_of(rank, case.reference) < 1e-4


# -- parameters in the pages of files


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.safetensors"))}


def map_and_train(folder: str, sharded: str) -> dict[str, Any]:
    """Load with maps, change what was loaded in place, and save it over the files that it stands in."""
    before = files_of(folder)
    model = load(folder, tp_map=True)
    result = {"report": model.tp_report, "read": bytes_read(model), "held": held(model), "headers": headers(folder)}
    with torch.no_grad():
        result["logits"] = model(PROMPTS, attention_mask=MASK).logits
        values = {name: tp_transformers.full_tensor(param) for name, param in model.named_parameters()}
        for param in model.parameters():
            param.mul_(2)
    result["files stay"] = files_of(folder) == before
    tp_transformers.save_sharded(model, sharded)
    model.save_pretrained(folder)
    result["doubled"] = all(
        torch.equal(tp_transformers.full_tensor(param), 2 * values[name])
        for again in (model, load(folder), load(sharded, tp_map=True))
        for name, param in again.named_parameters()
    )
    whole = load(sharded, tp_map=True)
    result["sharded"] = (whole.tp_report.mapped, held(whole))
    return result


@pytest.mark.parametrize("size", wide([3, 2], 1))
def test_parameters_may_live_in_the_files(pool: Any, cases: Any, tmp_path: Path, size: int) -> None:
    case = cases(9, 3)
    folder = shutil.copytree(case.folder, tmp_path / "model")
    for rank in pool.run(size, map_and_train, str(folder), str(tmp_path / "sharded")):
        found = rank["report"]
        assert 0 < found.mapped < rank["held"], "rows stay, columns are copied"
        assert found.mapped + rank["read"] == rank["held"] + rank["headers"]
        assert error_of(rank, case.reference) < 1e-4
        assert rank["files stay"], "a page that is written to is the process' own"
        assert rank["doubled"]
        assert rank["sharded"][0] == rank["sharded"][1], "nothing is copied of shards in files of their own"


# -- what goes wrong in the middle


def descriptors() -> set[str]:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.lexists(link)}


def load_with(fault: str, rank: int, folder: str) -> None:
    """Load, while `fault` happens on one rank; what is left open or running afterwards is told by another error."""
    own = int(os.environ["RANK"])
    undo = _FAULTS[fault](Path(folder)) if own == rank else (lambda: None)
    try:
        load(folder)
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


def truncated_under_a_map(folder: Path) -> Any:
    view = FileMap.view

    def truncating(self: FileMap, *arguments: Any) -> torch.Tensor:
        for path in folder.glob("*.safetensors"):
            os.truncate(path, 0)
        return view(self, *arguments)

    return patched(FileMap, "view", truncating)


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
    "truncated_under_a_map": truncated_under_a_map,
    "replaced": replaced,
}


@pytest.mark.parametrize("rank", wide([1, 0], 1))
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("io_error_in_the_header", "Input/output error"),
        ("io_error", r"reading at byte \d+ failed: Input/output error"),
        ("short_read", "truncated|end of the file|got another file"),
        ("truncated_under_a_map", "truncated while it was read|end of the file|got another file"),
        ("replaced", "got another file, or other contents"),
    ],
)
def test_a_fault_in_the_middle_stops_all_ranks(
    pool: Any, cases: Any, tmp_path: Path, fault: str, says: str, rank: int
) -> None:
    folder = shutil.copytree(cases(9, 3).folder, tmp_path / "model")
    with pytest.raises(WorkerError) as caught:
        pool.run(2, load_with, fault, rank, str(folder), timeout=60)
    errors = caught.value.errors
    assert len(errors) == 2
    for text in errors.values():
        assert text.startswith("CheckpointError")
        assert re.search(says, text), text
        assert ".safetensors" in text


KILLED = """
    import os, signal, sys
    import tp_transformers
    from tp_transformers.checkpoint.reading import reader
    from transformers import AutoModelForCausalLM

    run = reader._run

    def dying(*arguments):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        run(*arguments)

    reader._run = dying
    with tp_transformers.enable():
        AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto")
    print("loaded")
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others(cases: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLED))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, cases(9, 3).folder], capture_output=True, text=True, timeout=120, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.returncode != 0
    assert "loaded" not in done.stdout
    assert f"Signal {signal.SIGKILL.value}" in done.stderr


def die(folder: str) -> None:
    def dying(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1":
        reader._run = dying
    load(folder)


def test_the_others_say_that_a_rank_has_ended(pool: Any, cases: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(2, die, cases(9, 3).folder, timeout=60)
    assert caught.value.errors[0].startswith("RemoteRankError: another rank ended")
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
def test_an_initialisation_that_fails_on_one_rank_stops_the_others(
    pool: Any, cases: Any, tmp_path: Path, rank: int
) -> None:
    """The others would wait for its part in the broadcast of what is initialised."""
    AutoModel.from_pretrained(cases(9, 3).folder).save_pretrained(tmp_path)
    with pytest.raises(WorkerError) as caught:
        pool.run(2, initialise, str(tmp_path), rank, timeout=30)
    expected = f"RemoteRankError: rank {rank}: RuntimeError: no memory for the head"
    assert caught.value.errors == {0: expected, 1: expected}


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
            (loader, "open_checkpoint"),
            (LocalFile, "prefetch"),
            (reader, "_run"),
            (LocalFile, "check_unchanged"),
            (SummedWriter, "write_all"),
            (sharded, "check_save"),
            (Writer, "write"),
            (Writer, "finish"),
        ):
            stack.enter_context(slowly(owner, name, rank, seen))
        model = load(folder, tp_prefetch=True)
        tp_transformers.save_sharded(model, to + "/sharded")
        before = set(seen)
        seen.clear()
        model.save_pretrained(to + "/whole")
    assert all(
        torch.equal(tp_transformers.full_tensor(param), tp_transformers.full_tensor(again))
        for name in ("sharded", "whole")
        for param, again in zip(model.parameters(), load(f"{to}/{name}").parameters(), strict=True)
    )
    return before, set(seen)


@pytest.mark.slow
@pytest.mark.parametrize("rank", wide([0, 1], 1))
def test_ranks_wait_longer_than_a_collective_may(pool: Any, cases: Any, tmp_path: Path, rank: int) -> None:
    seen = pool.run(2, in_a_hurry, cases(9, 3).folder, str(tmp_path), rank, timeout=120)
    assert seen[1 - rank] == (set(), set())
    of_all = {"open_checkpoint", "prefetch", "_run", "check_unchanged", "write_all", "write", "finish"}
    assert seen[rank] == ((of_all | {"check_save"}, {"write", "finish"}) if rank == 0 else (of_all, set()))
