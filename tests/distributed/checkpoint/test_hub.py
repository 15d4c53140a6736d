"""Loading from a Hub on the loopback: without a download, and with one a node."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from huggingface_hub.utils import close_session
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MixtralForCausalLM

import tp_transformers
from tests.support.architectures import ARCHITECTURES
from tests.support.float8 import quantize_folder
from tests.support.hub_server import HubServer, commit_of
from tests.support.models import bytes_read, headers
from tests.support.pool import Pool, WorkerError
from tests.support.tiers import wide
from tp_transformers.checkpoint.hub import fetch as exchange
from tp_transformers.checkpoint.hub import fetch_plan as shares
from tp_transformers.checkpoint.hub import tries as http
from tp_transformers.checkpoint.hub.remote_file import RemoteFile
from tp_transformers.commands import cli
from tp_transformers.commands.plan.dry_load import survey
from tp_transformers.commands.plan.memory import plan_memory
from tp_transformers.commands.shard.offline import shard_checkpoint
from tp_transformers.loading import load as loader
from tp_transformers.ranks import group as group_module

pytestmark = pytest.mark.distributed

TOKEN = "hf_secret"

SMALL = {"DIRECT_BYTES": 4 << 10, "RANGE_BYTES": 16 << 10, "BLOCK_BYTES": 8 << 10}
"""Sizes by which tiny models take every path: several rounds, ranges of one's own, pieces."""


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def hub_pool(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Ranks that know no other Hub; huggingface_hub reads where it is as it is imported."""
    settings = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path_factory.mktemp("home")),
        "HF_HUB_DOWNLOAD_TIMEOUT": "2",
        "HF_HUB_DISABLE_XET": "1",
    }
    pool = Pool()
    with mock.patch.dict(os.environ, settings):
        pool.run(3, os.getpid)
        yield pool
    pool.close()


@pytest.fixture
def served(hub: HubServer) -> Iterator[HubServer]:
    """The Hub, with nothing on it."""
    hub.forget()
    hub.repositories.clear()
    hub.tokens.clear()
    yield hub
    hub.forget()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Mixtral of which every expert is stored alone, in several files."""
    folder = tmp_path_factory.mktemp("mixtral")
    ARCHITECTURES["mixtral"].make(9, 3).save_pretrained(folder / "first")
    MixtralForCausalLM.from_pretrained(folder / "first").save_pretrained(folder / "c", max_shard_size="60KB")
    return str(folder / "c")


def weight_bytes(folder: str | Path) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


def stored_weights(cache: str | Path) -> list[str]:
    """Files of a cache that are larger than config and index."""
    return [str(path) for path in Path(cache).rglob("*") if path.is_file() and path.stat().st_size > 20_000]


def stream(
    name: str,
    folder: str | None,
    cache: str,
    *,
    sizes: dict[str, int] | None = None,
    tries: int = 6,
    **arguments: Any,
) -> dict[str, Any]:
    """Load `name`, and compare it with what is loaded from `folder`."""
    with ExitStack() as changed:
        for constant, value in (SMALL if sizes is None else sizes).items():
            changed.enter_context(mock.patch.object(shares, constant, value))
        changed.enter_context(mock.patch.object(http, "FIRST_WAIT", 0.01))
        changed.enter_context(mock.patch.object(http, "TRIES", tries))
        changed.enter_context(tp_transformers.enable())
        arguments = {"tp_plan": "auto", "tp_stream": True, "cache_dir": cache, **arguments}
        model = AutoModelForCausalLM.from_pretrained(name, **arguments)
    if folder is not None:
        dtype = arguments.get("dtype", "auto")
        reference = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).named_parameters())
        different = [
            key
            for key, p in model.named_parameters()
            if not torch.equal(tp_transformers.full_tensor(p), reference[key])
        ]
    else:
        different = []
    return {"different": different, "read": bytes_read(model), "dtype": model.dtype}


# -- what arrives


@pytest.mark.parametrize("sizes", wide([SMALL, {}], 1), ids=["small blocks", "blocks as they are"])
@pytest.mark.parametrize("size", wide([3, 2, 1], 1))
@pytest.mark.parametrize("which", ["llama", "mixtral"])
def test_parameters_are_those_of_the_folder_and_bytes_travel_once(
    hub_pool: Any, served: HubServer, cases: Any, mixtral: str, tmp_path: Path, which: str, size: int, sizes: Any
) -> None:
    folder = cases(9, 3).folder if which == "llama" else mixtral
    served.add("org/model", folder)
    results = _run(hub_pool, size, "org/model", folder, str(tmp_path), sizes=sizes)
    assert all(not result["different"] for result in results)
    assert 0.97 < served.weights_sent() / weight_bytes(folder) < 1.03
    assert stored_weights(tmp_path) == []
    ranges = [seen.headers.get("Range") for seen in served.seen if seen.is_weights]
    assert all(ranges)
    assert len({seen.path for seen in served.seen if seen.method == "HEAD" and "safetensors" in seen.path}) == len(
        [seen for seen in served.seen if seen.method == "HEAD" and "safetensors" in seen.path]
    ), "the Hub is asked once for each file"


def _run(pool: Pool, size: int, *args: Any, **arguments: Any) -> list[dict[str, Any]]:
    return pool.run(size, _stream, args, arguments, timeout=90)


def _stream(args: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    return stream(*args, **arguments)


def test_values_and_scales_in_fp8_travel_once(hub_pool: Any, served: HubServer, mixtral: str, tmp_path: Path) -> None:
    expected = quantize_folder(mixtral, tmp_path / "float8", (16, 16))
    shutil.copytree(mixtral, tmp_path / "plain", ignore=shutil.ignore_patterns("model*"))
    save_file(expected, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    served.add("org/model", str(tmp_path / "float8"))
    cache = str(tmp_path / "cache")
    for result in _run(hub_pool, 2, "org/model", str(tmp_path / "plain"), cache, dtype=torch.bfloat16):
        assert result["different"] == []
    assert 0.95 < served.weights_sent() / weight_bytes(tmp_path / "float8") < 1.05
    assert stored_weights(cache) == []


def shard(name: str, target: str, arguments: dict[str, Any]) -> dict[str, bytes]:
    with mock.patch.object(secrets, "token_hex", return_value="0123abcd"):
        shard_checkpoint(name, target, size=3, **arguments)
    return {path.name: path.read_bytes() for path in Path(target).glob("rank-*")}


def test_sharding_needs_no_download_and_every_byte_once(
    hub_pool: Any, served: HubServer, mixtral: str, tmp_path: Path
) -> None:
    served.add("org/model", mixtral)
    arguments = {"tp_stream": True, "cache_dir": str(tmp_path / "cache")}
    (streamed,) = hub_pool.run(1, shard, "org/model", str(tmp_path / "streamed"), arguments)
    assert 0.97 < served.weights_sent() / weight_bytes(mixtral) < 1.03
    assert stored_weights(tmp_path / "cache") == []
    assert streamed == shard(mixtral, str(tmp_path / "local"), {})


def test_casts_are_staged_in_pieces(hub_pool: Any, served: HubServer, mixtral: str, tmp_path: Path) -> None:
    served.add("org/model", mixtral)
    results = _run(hub_pool, 3, "org/model", mixtral, str(tmp_path), dtype=torch.bfloat16)
    assert all(result == {**result, "different": [], "dtype": torch.bfloat16} for result in results)
    assert served.weights_sent() < 1.03 * weight_bytes(mixtral)


def test_what_ranks_hold_twice_travels_once(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    folder = cases(8, 1).folder
    served.add("org/model", folder)
    plan = {"model.layers.*.mlp.up_proj": "colwise_rep"}
    results = _run(hub_pool, 3, "org/model", folder, str(tmp_path), tp_plan=plan)
    assert all(not result["different"] for result in results)
    assert served.weights_sent() < 1.03 * weight_bytes(folder)


def _beside_nccl(folder: str, cache: str) -> dict[str, Any]:
    """As on GPUs, whose process group cannot send what is on the CPU, beside a group that only rank 0 is in."""
    dist.init_process_group("gloo")
    dist.new_group([0])
    known = len(dist.distributed_c10d._world.pg_map)
    original = exchange.fetch

    def fetch(requests: Any, *, group: Any, **arguments: Any) -> None:
        original(requests, group=dataclasses.replace(group, device=torch.device("cuda")), **arguments)

    bound = mock.Mock()
    with (
        mock.patch.object(loader, "fetch", fetch),
        mock.patch.object(exchange, "bind_thread", bound),
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
    ):
        result = stream("org/model", folder, cache)
    assert {call.args for call in bound.call_args_list} == {(torch.device("cuda"),)}, "threads choose the rank's device"
    return {**result, "groups": len(dist.distributed_c10d._world.pg_map) - known}


def test_a_channel_beside_a_group_of_gpus(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    folder = cases(9, 3).folder
    served.add("org/model", folder)
    for size in (2, 3):
        own = hub_pool.run(size, _beside_nccl, folder, str(tmp_path), timeout=120)
        assert all(not result["different"] and result["groups"] == 0 for result in own)


# -- faults that pass


@pytest.mark.parametrize(
    "faults",
    wide(
        [
            {"drop_every": 5},
            {"error_every": 7},
            {"error_every": 7, "error_status": 429, "retry_after": "0"},
            {"expire_after": 3},
            {"stall_every": 9, "stall": 4.0},
            {"drop_every": 5, "error_every": 7, "expire_after": 3},
        ],
        3,
    ),
    ids=lambda faults: " ".join(faults),
)
def test_faults_cost_only_time(
    hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path, faults: dict[str, Any]
) -> None:
    folder = cases(9, 3).folder
    served.add("org/model", folder)
    for name, value in faults.items():
        setattr(served.faults, name, value)
    # Half of all requests fail, in an order that differs from run to run.
    results = _run(hub_pool, 2, "org/model", folder, str(tmp_path), tries=30)
    assert all(not result["different"] for result in results)
    statuses = [seen.status for seen in served.seen]
    if "expire_after" in faults:
        assert 403 in statuses
    if "error_every" in faults:
        assert statuses.count(faults.get("error_status", 503)) > 3
    if "drop_every" in faults:
        assert len([seen for seen in served.seen if seen.is_weights]) > 20


def test_the_token_stays_with_the_hub(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    folder = cases(9, 3).folder
    served.add("org/model", folder, token=TOKEN)
    served.faults.expire_after = 3
    results = _run(hub_pool, 2, "org/model", folder, str(tmp_path), token=TOKEN, tries=30)
    assert all(not result["different"] for result in results)
    hosts = {seen.host for seen in served.seen}
    assert hosts == {"127.0.0.1", "localhost"}
    for seen in served.seen:
        assert (seen.host == "localhost") == ("/cdn/" in seen.path)
        assert seen.headers.get("authorization", seen.headers.get("Authorization")) == (
            None if seen.host == "localhost" else f"Bearer {TOKEN}"
        )


# -- faults that do not


def _fail(pool: Pool, size: int, *args: Any, **arguments: Any) -> str:
    """The error that all ranks raise."""
    with pytest.raises(WorkerError) as caught:
        _run(pool, size, *args, **arguments)
    assert len(caught.value.errors) == size, caught.value
    errors = {error.partition("rank ")[0] + error.rpartition("rank ")[2][3:] for error in caught.value.errors.values()}
    assert len(set(caught.value.errors.values())) == 1, errors
    return next(iter(caught.value.errors.values()))


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ({"ignore_range": True}, "got the whole file in answer to a Range request"),
        ({"change_after": 9}, "-changed, expected ETag cdn-"),
        ({"refuse": {"model-00003-of-00007.safetensors": 404}}, "status 404 from localhost in 6 tries"),
        ({"refuse": {"model-00003-of-00007.safetensors": 500}}, "status 500 in 6 tries"),
        ({"refuse": {"model-00003-of-00007.safetensors": 418}}, "status 418"),
        ({"gzip": "gzip"}, "got Content-Encoding gzip, expected the bytes as they are"),
        ({"gzip": ""}, " bytes, expected "),
    ],
)
@pytest.mark.parametrize("size", wide([2, 3], 1))
def test_one_error_on_all_ranks(
    hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path, faults: dict[str, Any], says: str, size: int
) -> None:
    folder = cases(8, 4).folder
    served.add("org/model", folder)
    for name, value in faults.items():
        setattr(served.faults, name, value)
    error = _fail(hub_pool, size, "org/model", None, str(tmp_path))
    assert error.startswith("CheckpointError: ")
    assert says in error
    if "ignore_range" in faults:
        assert all(seen.sent < 100 << 10 for seen in served.seen if seen.is_weights), "bodies are not read"


def test_a_fetch_that_fails_on_one_rank_stops_the_others(
    hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path
) -> None:
    folder = cases(8, 4).folder
    served.add("org/model", folder)
    with pytest.raises(WorkerError) as caught:
        hub_pool.run(3, _break_reads_of_rank_1, str(tmp_path), timeout=60)
    assert set(caught.value.errors.values()) == {"CheckpointError: rank 1: it broke"}
    assert len(caught.value.errors) == 3


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


@pytest.mark.parametrize("thread", ["download", "fetch"])
def test_a_rank_without_threads_stops_the_others(
    hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path, thread: str
) -> None:
    served.add("org/model", cases(8, 4).folder)
    with pytest.raises(WorkerError) as caught:
        hub_pool.run(2, _start_no_threads_on_rank_1, thread, str(tmp_path), timeout=60)
    assert set(caught.value.errors.values()) == {"RemoteRankError: rank 1: RuntimeError: can't start new thread"}


def _start_no_threads_on_rank_1(thread: str, cache: str) -> None:
    class NoThreads(ThreadPoolExecutor):
        def submit(self, *args: Any) -> Any:
            raise RuntimeError("can't start new thread")

    module = {"download": group_module, "fetch": exchange}[thread]
    with mock.patch.object(module, "ThreadPoolExecutor", NoThreads) if os.environ["RANK"] == "1" else nullcontext():
        stream("org/model", None, cache)


def test_who_is_not_let_in_or_looks_for_what_is_not_there(
    hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path
) -> None:
    folder = cases(8, 4).folder
    served.add("org/gated", folder, token=TOKEN)
    served.add("org/model", folder)
    served.add("org/empty", tmp_path)
    for name, arguments, says in (
        ("org/gated", {}, "got a gated repository that this token has no access to"),
        ("org/gated", {"token": "hf_other"}, "got a gated repository"),
        ("org/nothing", {}, "org/nothing/resolve/main/config.json on the Hub: got no such repository"),
        ("org/model", {"revision": "v9"}, "got no such revision"),
        ("org/model", {"variant": "fp16"}, "got no model.fp16.safetensors and no model.safetensors.index.fp16.json"),
        ("org/model", {"use_safetensors": False}, "got the file pytorch_model.bin"),
    ):
        error = _fail(hub_pool, 2, name, None, str(tmp_path / "cache"), **arguments)
        assert error.startswith("CheckpointError: "), error
        assert says in error


def test_pickles_are_not_streamed(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    shutil.copy(Path(cases(8, 4).folder) / "config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    served.add("org/model", tmp_path)
    error = _fail(hub_pool, 2, "org/model", None, str(tmp_path / "cache"))
    assert "got the file pytorch_model.bin" in error
    assert "save_pretrained" in error


def test_a_hub_that_is_gone(hub_pool: Any, served: HubServer, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        hub_pool.run(2, _load_from_nowhere, str(tmp_path), timeout=60)
    (error,) = set(caught.value.errors.values())
    assert error.startswith("CheckpointError: rank 0: http://127.0.0.1:9/")
    assert "ConnectError" in error
    assert "in 6 tries" in error


def _load_from_nowhere(cache: str) -> None:
    nowhere = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    with mock.patch("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", nowhere):
        stream("org/model", None, cache)


def test_an_index_that_leaves_the_repository(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(cases(8, 4).folder, folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-00002', '"../../other/model-00002'))
    served.add("org/model", folder)
    assert "an index that names ../../other/model-00002" in _fail(
        hub_pool, 2, "org/model", None, str(tmp_path / "cache")
    )


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, "[]", '{"weight_map": null}', '{"weight_map": {"a": [1], "b": "c"}}']
)
def test_an_index_that_is_none(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path, text: str) -> None:
    shutil.copy(Path(cases(8, 4).folder) / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    served.add("org/model", tmp_path)
    error = _fail(hub_pool, 2, "org/model", None, str(tmp_path / "cache"))
    assert error.startswith("CheckpointError: rank 0: org/model on the Hub: got")
    assert "index" in error


# -- nothing is left


def test_no_thread_and_no_descriptor_is_left(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    served.add("org/model", cases(9, 3).folder)
    counts = [hub_pool.run(2, _count_after, str(tmp_path)) for _ in range(4)]
    assert all(last <= second for last, second in zip(counts[-1], counts[1], strict=True)), counts
    served.faults.ignore_range = True
    failed = [hub_pool.run(2, _count_after, str(tmp_path)) for _ in range(3)]
    assert all(last <= first for last, first in zip(failed[-1], failed[0], strict=True)), failed


def _count_after(cache: str) -> tuple[int, int]:
    with suppress(tp_transformers.CheckpointError):
        stream("org/model", None, cache)
    close_session()  # its connections are kept alive for whoever asks next
    dist.destroy_process_group()  # whose connections come and go
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


# -- ways to name a checkpoint


def test_ways_to_name_a_checkpoint(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    folder = Path(cases(8, 4).folder)
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(folder).half().save_pretrained(other)  # a single file
    (other / "config.json").write_text((other / "config.json").read_text().replace('"float16"', "null"))
    for name in ("model.fp16.safetensors", "sub/model.safetensors", "sub/config.json"):
        (other / name).parent.mkdir(exist_ok=True)
        source = other / ("config.json" if name.endswith("config.json") else "model.safetensors")
        shutil.copy(source, other / name)
    served.add("org/model", folder)
    served.add("org/model", other, revision="half")
    for arguments in (
        {"revision": "half"},
        {"revision": commit_of("org/model", "half")},
        {"revision": "half", "variant": "fp16", "use_safetensors": True},
        {"revision": "half", "subfolder": "sub"},
    ):
        served.seen.clear()
        results = _run(hub_pool, 2, "org/model", str(other), str(tmp_path / "cache"), **arguments)
        assert all(result == {**result, "different": [], "dtype": torch.float16} for result in results), arguments
        wanted = arguments.get("variant", "") + arguments.get("subfolder", "")
        assert all(wanted in seen.path for seen in served.seen if seen.is_weights)
    assert stored_weights(tmp_path / "cache") == []


def test_what_was_downloaded_before_is_read_from_the_cache(
    hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path
) -> None:
    folder = cases(8, 4).folder
    served.add("org/model", folder)
    hub_pool.run(1, _download, str(tmp_path / "0"), ["model-00002-of-00007.safetensors"])
    hub_pool.run(
        1, _download, str(tmp_path / "1"), ["model-00002-of-00007.safetensors", "model-00003-of-00007.safetensors"]
    )
    served.seen.clear()
    results = hub_pool.run(2, _stream_from_own_cache, "org/model", folder, str(tmp_path))
    assert all(not result["different"] for result in results)
    asked = {Path(seen.path.partition("?")[0]).name for seen in served.seen if seen.is_weights}
    assert "model-00002-of-00007.safetensors" not in asked
    assert "model-00003-of-00007.safetensors" in asked
    # Of a file that one rank has, the other fetches its own part, or is given it.
    assert (
        served.weights_sent()
        < weight_bytes(folder) - (Path(folder) / "model-00002-of-00007.safetensors").stat().st_size
    )


def _download(cache: str, files: list[str]) -> None:
    from huggingface_hub import hf_hub_download

    for file in files:
        hf_hub_download("org/model", file, cache_dir=cache)


def _stream_from_own_cache(name: str, folder: str, caches: str) -> dict[str, Any]:
    return stream(name, folder, f"{caches}/{os.environ['RANK']}")


def test_offline(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    folder = cases(8, 4).folder
    served.add("org/model", folder)
    with pytest.raises(WorkerError) as caught:
        hub_pool.run(2, _offline, folder, str(tmp_path))
    assert len(caught.value.errors) == 2
    assert all("org/model" in error or "offline" in error for error in caught.value.errors.values())
    assert not served.seen
    _run(hub_pool, 2, "org/model", folder, str(tmp_path), tp_stream=False)
    served.seen.clear()
    assert all(not result["different"] for result in hub_pool.run(2, _offline, folder, str(tmp_path)))
    assert not served.seen


def _offline(folder: str, cache: str) -> dict[str, Any]:
    with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        return stream("org/model", folder, cache)


def test_a_folder_is_just_loaded(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    folder = cases(8, 4).folder
    assert all(not result["different"] for result in _run(hub_pool, 2, folder, folder, str(tmp_path)))
    assert not served.seen


def _by_environment(name: str, folder: str, cache: str) -> dict[str, Any]:
    with mock.patch.dict(os.environ, TP_TRANSFORMERS_STREAM="1"):
        return stream(name, folder, cache, tp_stream=None)


def test_the_environment_variable(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    folder = cases(8, 4).folder
    served.add("org/model", folder)
    hub_pool.run(2, _by_environment, "org/model", folder, str(tmp_path))
    assert stored_weights(tmp_path) == []


def _stream_on_rank_1(cache: str) -> None:
    stream("org/model", None, cache, tp_stream=os.environ["RANK"] == "1")


def test_ranks_have_to_agree(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    served.add("org/model", cases(8, 4).folder)
    with pytest.raises(WorkerError) as caught:
        hub_pool.run(2, _stream_on_rank_1, str(tmp_path), timeout=60)
    assert all(error.startswith("MeshError: tp_stream: ") for error in caught.value.errors.values())


# -- with a download


def test_one_rank_of_a_node_downloads(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    folder = cases(8, 4).folder
    served.add("org/model", folder)
    for arguments in ({}, {"force_download": True}):
        served.seen.clear()
        results = _run(hub_pool, 3, "org/model", folder, str(tmp_path), tp_stream=False, **arguments)
        assert all(not result["different"] for result in results)
        assert served.weights_sent() == weight_bytes(folder)


def test_a_download_that_fails_stops_all(hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path) -> None:
    served.add("org/model", cases(8, 4).folder)
    served.faults.refuse = {"model-00003-of-00007.safetensors": 404}
    error = _fail(hub_pool, 3, "org/model", None, str(tmp_path), tp_stream=False)
    assert error.startswith("CheckpointError: rank 0: ")
    assert len({seen.path for seen in served.seen if seen.status == 404 and seen.is_weights}) == 1


def _in_a_hurry(folder: str, cache: str, tp_stream: bool) -> dict[str, Any]:
    """With collectives that give up after 4 seconds."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    with mock.patch.object(group_module, "HEARTBEAT", 0.5):
        return stream("org/model", folder, cache, tp_stream=tp_stream, sizes={})


@pytest.mark.slow
@pytest.mark.parametrize("tp_stream", [True, False])
def test_ranks_wait_longer_than_a_collective_may(
    hub_pool: Any, served: HubServer, cases: Any, tmp_path: Path, tp_stream: bool
) -> None:
    folder = cases(8, 4).folder
    served.add("org/model", folder)
    served.faults.error_every, served.faults.retry_after = 3, "4"
    served.faults.error_status = 429
    assert all(not r["different"] for r in hub_pool.run(3, _in_a_hurry, folder, str(tmp_path), tp_stream, timeout=120))


def plan_alone(name: str, cache: str, *arguments: str) -> dict[str, Any]:
    """Run `tp-transformers plan` as one process that torchrun might have started, and starts no group."""
    said = io.StringIO()
    with mock.patch("huggingface_hub.constants.HF_HUB_CACHE", cache), redirect_stdout(said):
        code = cli.main(["plan", name, "--json", *arguments])
    assert not dist.is_initialized()
    return {"code": code, **(json.loads(said.getvalue()) if not code else {})}


def test_a_plan_of_what_is_on_the_hub_reads_headers_alone(
    hub_pool: Pool, served: HubServer, mixtral: str, tmp_path: Path
) -> None:
    served.add("org/moe", tmp_path)  # nothing; transformers 5.6 looks there for adapters, whatever the revision
    served.add("org/moe", mixtral, revision="old")
    (said,) = hub_pool.run(1, plan_alone, "org/moe", str(tmp_path), "--tp-size", "3", "--revision", "old")
    here = plan_memory(survey(mixtral), 3, context=64)  # as long as it can be
    assert [rank["total_bytes"] for rank in said["ranks"]] == list(here.total_bytes)
    assert here.survey.stock is not None
    assert said["checkpoint"]["bytes_read"] == here.survey.stock.bytes_read == served.weights_sent() == headers(mixtral)
    assert not stored_weights(tmp_path)
    assert hub_pool.run(1, plan_alone, "org/moe", str(tmp_path), "--tp-size", "3")[0]["code"] == 2  # has no config
