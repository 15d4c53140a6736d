"""Faults of the Hub and of ranks that read from it: those that pass cost time, others are one error on all ranks."""

import gc
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from huggingface_hub.utils import close_session

import tp_transformers
from tests.support.hub import fail, run, stream
from tests.support.hub_server import Faults
from tests.support.pool import forget_meshes
from tests.support.tiers import wide
from tp_transformers.features.hub_streaming import fetch as exchange
from tp_transformers.features.hub_streaming.remote_file import RemoteFile
from tp_transformers.features.watch.poller import POLLER
from tp_transformers.ranks import group as group_module

TOKEN = "hf_secret"


# -- faults that pass


@pytest.mark.parametrize(
    "faults",
    wide(
        [
            {"drop_every": 5},
            {"error_every": 7},
            {"error_every": 7, "error_status": 429, "retry_after": "0"},
            {"stall_every": 9, "stall": 4.0},
            {"drop_every": 5, "error_every": 7, "expire_after": 3},
        ],
        2,
    ),
    ids=lambda faults: " ".join(faults),
)
def test_faults_cost_only_time(hub_pool, served, offer, tmp_path, faults) -> None:
    folder, served.faults = offer(9, 3), Faults(**faults)
    # Half of all requests fail, in an order that differs from run to run.
    run(hub_pool, 2, "org/model", folder, str(tmp_path), tries=30)
    statuses = [seen.status for seen in served.seen]
    if "error_every" in faults:
        assert statuses.count(faults.get("error_status", 503)) > 3
    if "drop_every" in faults:
        assert len([seen for seen in served.seen if seen.is_weights]) > 20


def test_urls_expire_and_the_token_stays_with_the_hub(hub_pool, served, offer, tmp_path) -> None:
    folder, served.faults.expire_after = offer(9, 3, token=TOKEN), 3
    run(hub_pool, 2, "org/model", folder, str(tmp_path), token=TOKEN, tries=30)
    assert 403 in [seen.status for seen in served.seen]
    assert {seen.host for seen in served.seen} == {"127.0.0.1", "localhost"}
    for seen in served.seen:
        assert (seen.host == "localhost") == ("/cdn/" in seen.path)
        assert seen.authorization == (None if seen.host == "localhost" else f"Bearer {TOKEN}")


# -- faults that do not


@pytest.mark.parametrize(
    ("faults", "says"),  # others in ../unit
    [
        ({"ignore_range": True}, "got the full file in answer to a Range request"),
        ({"refuse": {"model-00003-of-00007.safetensors": 404}}, "status 404 from localhost in 6 tries"),
    ],
)
@pytest.mark.parametrize("size", wide([2, 3], 1))
def test_one_error_on_all_ranks(hub_pool, served, offer, tmp_path, faults, says, size) -> None:
    offer(8, 4)
    served.faults = Faults(**faults)
    error = fail(hub_pool, size, "org/model", None, str(tmp_path))
    assert error.startswith("CheckpointError: ")
    assert says in error
    if "ignore_range" in faults:
        assert all(seen.sent < 100 << 10 for seen in served.seen if seen.is_weights), "bodies are not read"


def _break_reads_of_rank_1(cache: str) -> None:
    count = 0
    original = RemoteFile.read

    def read(self: Any, offset: int, buffers: Any) -> None:
        nonlocal count
        count += offset > 2000  # not of a header
        if os.environ["RANK"] == "1" and count > 3:
            raise tp_transformers.CheckpointError("it broke")
        original(self, offset, buffers)

    with mock.patch.object(RemoteFile, "read", read):
        stream("org/model", None, cache)


def _end_memory_of_rank_1(after: int, cache: str) -> None:
    count, original = 0, exchange._copy

    def copy(*args: Any) -> None:
        nonlocal count
        count += 1
        if os.environ["RANK"] == "1" and count > after:
            raise MemoryError("none left")
        original(*args)

    with mock.patch.object(exchange, "_copy", copy):
        stream("org/model", None, cache)


def _start_no_threads_on_rank_1(thread: str, cache: str) -> None:
    class NoThreads(ThreadPoolExecutor):
        def submit(self, *args: Any) -> Any:
            raise RuntimeError("can't start new thread")

    module = {"download": group_module, "fetch": exchange}[thread]
    with mock.patch.object(module, "ThreadPoolExecutor", NoThreads) if os.environ["RANK"] == "1" else nullcontext():
        stream("org/model", None, cache)


def _stream_on_rank_1(cache: str) -> None:
    stream("org/model", None, cache, tp_stream=os.environ["RANK"] == "1")


NO_MEMORY = r"MeshError: rank 1: memory: got no more of it \(MemoryError: none left\), expected enough.*"
NO_THREAD = "RemoteRankError: rank 1: RuntimeError: can't start new thread"


@pytest.mark.parametrize(
    ("size", "breaks", "says"),
    [
        (3, _break_reads_of_rank_1, "CheckpointError: rank 1: it broke"),
        (3, partial(_end_memory_of_rank_1, 0), NO_MEMORY),
        (3, partial(_end_memory_of_rank_1, 7), NO_MEMORY),
        (2, partial(_start_no_threads_on_rank_1, "download"), NO_THREAD),
        (2, partial(_start_no_threads_on_rank_1, "fetch"), NO_THREAD),
        (2, _stream_on_rank_1, "MeshError: tp_stream: .*"),
    ],
    ids=["a read", "no memory", "none later", "no thread", "none to fetch", "another argument"],
)
def test_what_fails_on_one_rank_stops_the_others(hub_pool, offer, tmp_path, size, breaks, says) -> None:
    offer(9, 3)
    assert re.fullmatch(says, hub_pool.error(size, breaks, str(tmp_path), timeout=60), re.DOTALL)


def test_who_is_not_let_in_or_looks_for_what_is_not_there(hub_pool, served, cases, tmp_path) -> None:
    folder = cases(8, 4).folder
    served.add("org/gated", folder, token=TOKEN)
    served.add("org/model", folder)
    served.add("org/empty", tmp_path)
    first, second = hub_pool.run(2, _not_let_in, str(tmp_path / "cache"), timeout=90)
    assert first == second
    for error, (_, _, says) in zip(first, NOT_LET_IN, strict=True):
        assert says in error


NOT_LET_IN: list[tuple[str, dict[str, Any], str]] = [
    ("org/gated", {}, "got a gated repository that this token has no access to"),
    ("org/gated", {"token": "hf_other"}, "got a gated repository"),
    ("org/nothing", {}, "org/nothing/resolve/main/config.json on the Hub: got no such repository"),
    ("org/model", {"revision": "v9"}, "got no such revision"),
    ("org/model", {"variant": "fp16"}, "got no model.fp16.safetensors and no model.safetensors.index.fp16.json"),
    ("org/model", {"use_safetensors": False}, "got the file pytorch_model.bin"),
]
"""(repository, arguments of the load, the error)."""


def _not_let_in(cache: str) -> list[str]:
    errors = []
    for name, arguments, _ in NOT_LET_IN:
        with pytest.raises(tp_transformers.CheckpointError) as caught:
            stream(name, None, cache, **arguments)
        errors.append(str(caught.value))
    return errors


def test_a_hub_that_is_gone(hub_pool, served, tmp_path) -> None:
    error = hub_pool.error(2, _load_from_nowhere, str(tmp_path), timeout=60)
    assert error.startswith("CheckpointError: rank 0: http://127.0.0.1:9/")
    assert "ConnectError" in error
    assert "in 6 tries" in error


def _load_from_nowhere(cache: str) -> None:
    nowhere = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    with mock.patch("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", nowhere):
        stream("org/model", None, cache)


def test_an_index_that_leaves_the_repository(hub_pool, served, cases, tmp_path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(cases(8, 4).folder, folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-00002', '"../../other/model-00002'))
    served.add("org/model", folder)
    assert "an index that names ../../other/model-00002" in fail(
        hub_pool, 2, "org/model", None, str(tmp_path / "cache")
    )


INDEX = "model.safetensors.index.json"
NO_INDEX = rf"rank 0: checkpoint file .*models--org--model.*{INDEX}: got an index that cannot be read"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("pytorch_model.bin", "", "got the file pytorch_model.bin.*save_pretrained"),  # pickles are not streamed
        *wide(
            [
                (INDEX, text, NO_INDEX)
                for text in ("[" * 100_000, '{"weight_map": {"a": [1], "b": "c"}}', "{", "[]", '{"weight_map": null}')
            ],
            2,
        ),
    ],
)
def test_a_repository_without_weights(hub_pool, served, cases, tmp_path, name, content, says) -> None:
    shutil.copy(Path(cases(8, 4).folder) / "config.json", tmp_path)
    (tmp_path / name).write_text(content)
    served.add("org/model", tmp_path)
    assert re.match(
        f"CheckpointError: .*{says}", fail(hub_pool, 2, "org/model", None, str(tmp_path / "cache")), re.DOTALL
    )


# -- nothing is left


@pytest.mark.parametrize("ignores", wide([False, True], 1))
def test_no_thread_and_no_descriptor_is_left(hub_pool, served, offer, tmp_path, ignores) -> None:
    offer(9, 3)
    served.faults.ignore_range = ignores
    counts = [hub_pool.run(2, _count_after, str(tmp_path)) for _ in range(3)]
    for *before, last in zip(*counts, strict=True):  # of each rank
        for kind in range(2):
            assert last[kind] <= max(count[kind] for count in before), counts


def _count_after(cache: str) -> tuple[int, int]:
    """Descriptors and threads that are left, the least of ten counts: the other rank's connections end in its time."""
    with suppress(tp_transformers.CheckpointError):
        stream("org/model", None, cache)
    close_session()  # its connections are kept alive for whoever asks next
    dist.destroy_process_group()  # whose connections come and go
    forget_meshes()
    gc.collect()
    POLLER.soon()  # it closes the store's connection of a model that is gone
    counts = []
    for _ in range(10):
        time.sleep(0.05)
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return min(fds for fds, _ in counts), min(threads for _, threads in counts)


def _in_a_hurry(folder: str, cache: str, tp_stream: bool) -> dict[str, Any]:
    """With collectives that give up after 4 seconds."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    with mock.patch.object(group_module, "HEARTBEAT", 0.5):
        return stream("org/model", folder, cache, tp_stream=tp_stream, sizes={})


@pytest.mark.slow
@pytest.mark.parametrize("tp_stream", [True, False])
def test_ranks_wait_longer_than_a_collective_may(hub_pool, served, offer, tmp_path, tp_stream) -> None:
    folder, served.faults = offer(8, 4), Faults(error_every=3, error_status=429, retry_after="4")
    assert all(not r["different"] for r in hub_pool.run(3, _in_a_hurry, folder, str(tmp_path), tp_stream, timeout=120))
