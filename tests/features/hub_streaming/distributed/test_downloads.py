"""Checkpoints of the Hub that are in the cache, or come there: one rank of a node downloads."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import AutoModelForCausalLM

from tests.support.comparisons import different_tensors, full_parameters
from tests.support.gguf_files import write_gguf
from tests.support.hub import fail, run, stream, weight_bytes
from tests.support.models import llama_config, load
from tests.support.pool import WorkerError


def test_what_was_downloaded_before_is_read_from_the_cache(hub_pool, served, offer, tmp_path) -> None:
    folder, (second, third) = offer(8, 4), (f"model-0000{number}-of-00007.safetensors" for number in (2, 3))
    hub_pool.run(1, _download, str(tmp_path / "0"), [second])
    hub_pool.run(1, _download, str(tmp_path / "1"), [second, third])
    served.seen.clear()
    results = hub_pool.run(2, _stream_from_own_cache, "org/model", folder, str(tmp_path))
    assert all(not result["different"] for result in results)
    asked = {Path(seen.path.partition("?")[0]).name for seen in served.seen if seen.is_weights}
    assert second not in asked
    assert third in asked
    # Of a file that one rank has, the other fetches its own part, or is given it.
    assert served.weights_sent() < weight_bytes(folder) - (Path(folder) / second).stat().st_size


def _download(cache: str, files: list[str]) -> None:
    from huggingface_hub import hf_hub_download

    for file in files:
        hf_hub_download("org/model", file, cache_dir=cache)


def _stream_from_own_cache(name: str, folder: str, caches: str) -> dict[str, Any]:
    return stream(name, folder, f"{caches}/{os.environ['RANK']}")


def test_offline(hub_pool, served, offer, tmp_path) -> None:
    folder = offer(8, 4)
    with pytest.raises(WorkerError) as caught:
        hub_pool.run(2, _offline, folder, str(tmp_path))
    assert len(caught.value.errors) == 2
    assert all("org/model" in error or "offline" in error for error in caught.value.errors.values())
    assert not served.seen
    run(hub_pool, 2, "org/model", folder, str(tmp_path), tp_stream=False)
    served.seen.clear()
    assert all(not result["different"] for result in hub_pool.run(2, _offline, folder, str(tmp_path)))
    assert not served.seen


def _offline(folder: str, cache: str) -> dict[str, Any]:
    with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        return stream("org/model", folder, cache)


def test_one_rank_of_a_node_downloads(hub_pool, served, offer, tmp_path) -> None:
    folder = offer(8, 4)
    for arguments in ({}, {"force_download": True}):
        served.seen.clear()
        run(hub_pool, 3, "org/model", folder, str(tmp_path), tp_stream=False, **arguments)
        assert served.weights_sent() == weight_bytes(folder)


def test_a_download_that_fails_stops_all(hub_pool, served, offer, tmp_path) -> None:
    offer(8, 4)
    served.faults.refuse = {"model-00003-of-00007.safetensors": 404}
    error = fail(hub_pool, 3, "org/model", None, str(tmp_path), tp_stream=False)
    assert error.startswith("CheckpointError: rank 0: ")
    assert len({seen.path for seen in served.seen if seen.status == 404 and seen.is_weights}) == 1


def test_one_rank_downloads_a_gguf_file(hub_pool, served, tmp_path) -> None:
    folder, path = tmp_path / "model", tmp_path / "model" / "model.gguf"
    folder.mkdir()
    write_gguf(path, "llama", llama_config(8, 4, intermediate_size=96), {"w": "Q4_0"})
    served.add("org/gguf", folder)
    for result in hub_pool.run(2, _load_gguf, "org/gguf", str(folder), str(tmp_path / "cache")):
        assert result == []
    sent = sum(seen.sent for seen in served.seen if seen.method == "GET" and "model.gguf" in seen.path)
    assert sent == path.stat().st_size


def _load_gguf(name: str, folder: str, cache: str) -> list[str]:
    model = load(name, gguf_file="model.gguf", cache_dir=cache)
    reference = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
    return different_tensors(full_parameters(model), dict(reference.named_parameters()))
