"""Loading from a Hub on the loopback without a download: the right values, and every byte once."""

import dataclasses
import io
import json
import os
import secrets
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.support.architectures import ARCHITECTURES
from tests.support.commands import main
from tests.support.float8 import quantize_folder
from tests.support.hub import SMALL, run, stored_weights, stream, weight_bytes
from tests.support.hub_server import commit_of
from tests.support.models import headers, save_as_loaded
from tests.support.tiers import wide
from tp_transformers.features.hub_streaming import fetch as exchange
from tp_transformers.features.hub_streaming import hub
from tp_transformers.features.planner.dry_load import survey
from tp_transformers.features.planner.memory import plan_memory
from tp_transformers.features.presharded.offline import shard_checkpoint


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Mixtral of which every expert is stored alone, in several files."""
    folder = tmp_path_factory.mktemp("mixtral")
    save_as_loaded(ARCHITECTURES["mixtral"].make(9, 3), folder, max_shard_size="60KB")
    return str(folder / "checkpoint")


@pytest.mark.parametrize("sizes", wide([SMALL, {}], 1), ids=["small blocks", "blocks as they are"])
@pytest.mark.parametrize("size", wide([3, 2, 1], 1))
@pytest.mark.parametrize("which", ["llama", "mixtral"])
def test_parameters_are_those_of_the_folder_and_bytes_travel_once(
    hub_pool, served, cases, mixtral, tmp_path, which, size, sizes
) -> None:
    folder = cases(9, 3).folder if which == "llama" else mixtral
    served.add("org/model", folder)
    run(hub_pool, size, "org/model", folder, str(tmp_path), sizes=sizes)
    assert 0.97 < served.weights_sent() / weight_bytes(folder) < 1.03
    assert stored_weights(tmp_path) == []
    assert all(seen.headers.get("Range") for seen in served.seen if seen.is_weights)
    asked = [seen.path for seen in served.seen if seen.method == "HEAD" and "safetensors" in seen.path]
    assert len(asked) == len(set(asked)), "the Hub is asked once for each file"


def test_values_and_scales_in_fp8_travel_once(hub_pool, served, mixtral, tmp_path) -> None:
    expected = quantize_folder(mixtral, tmp_path / "float8", (16, 16))
    shutil.copytree(mixtral, tmp_path / "plain", ignore=shutil.ignore_patterns("model*"))
    save_file(expected, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    served.add("org/model", str(tmp_path / "float8"))
    cache = str(tmp_path / "cache")
    run(hub_pool, 2, "org/model", str(tmp_path / "plain"), cache, dtype=torch.bfloat16)
    assert 0.95 < served.weights_sent() / weight_bytes(tmp_path / "float8") < 1.05
    assert stored_weights(cache) == []


def shard(name: str, target: str, arguments: dict[str, Any]) -> dict[str, bytes]:
    with mock.patch.object(secrets, "token_hex", return_value="0123abcd"):
        shard_checkpoint(name, target, size=3, **arguments)
    return {path.name: path.read_bytes() for path in Path(target).glob("rank-*")}


def test_sharding_needs_no_download_and_every_byte_once(hub_pool, served, mixtral, tmp_path) -> None:
    served.add("org/model", mixtral)
    arguments = {"tp_stream": True, "cache_dir": str(tmp_path / "cache")}
    (streamed,) = hub_pool.run(1, shard, "org/model", str(tmp_path / "streamed"), arguments)
    assert 0.97 < served.weights_sent() / weight_bytes(mixtral) < 1.03
    assert stored_weights(tmp_path / "cache") == []
    assert streamed == shard(mixtral, str(tmp_path / "local"), {})


def test_casts_are_staged_in_blocks(hub_pool, served, mixtral, tmp_path) -> None:
    served.add("org/model", mixtral)
    results = run(hub_pool, 3, "org/model", mixtral, str(tmp_path), dtype=torch.bfloat16)
    assert {result["dtype"] for result in results} == {torch.bfloat16}
    assert served.weights_sent() < 1.03 * weight_bytes(mixtral)


def test_what_ranks_hold_twice_travels_once(hub_pool, served, offer, tmp_path) -> None:
    folder, plan = offer(8, 1), {"model.layers.*.mlp.up_proj": "colwise_rep"}
    run(hub_pool, 3, "org/model", folder, str(tmp_path), tp_plan=plan)
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
        mock.patch.object(hub, "fetch", fetch),
        mock.patch.object(exchange, "bind_thread", bound),
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
    ):
        result = stream("org/model", folder, cache)
    assert {call.args for call in bound.call_args_list} == {(torch.device("cuda"),)}, "threads choose the rank's device"
    return {**result, "groups": len(dist.distributed_c10d._world.pg_map) - known}


def test_a_channel_beside_a_group_of_gpus(hub_pool, offer, tmp_path) -> None:
    folder = offer(9, 3)
    for size in (2, 3):
        own = hub_pool.run(size, _beside_nccl, folder, str(tmp_path), timeout=120)
        assert all(not result["different"] and result["groups"] == 0 for result in own)


# -- ways to name a checkpoint


def test_ways_to_name_a_checkpoint(hub_pool, served, offer, tmp_path) -> None:
    folder = Path(offer(8, 4))
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(folder).half().save_pretrained(other)  # a single file
    (other / "config.json").write_text((other / "config.json").read_text().replace('"float16"', "null"))
    for name in ("model.fp16.safetensors", "sub/model.safetensors", "sub/config.json"):
        (other / name).parent.mkdir(exist_ok=True)
        source = other / ("config.json" if name.endswith("config.json") else "model.safetensors")
        shutil.copy(source, other / name)
    served.add("org/model", other, revision="half")
    for arguments in (
        {"revision": "half"},
        {"revision": commit_of("org/model", "half")},
        {"revision": "half", "variant": "fp16", "use_safetensors": True},
        {"revision": "half", "subfolder": "sub"},
    ):
        served.seen.clear()
        results = run(hub_pool, 2, "org/model", str(other), str(tmp_path / "cache"), **arguments)
        assert {result["dtype"] for result in results} == {torch.float16}, arguments
        wanted = arguments.get("variant", "") + arguments.get("subfolder", "")
        assert all(wanted in seen.path for seen in served.seen if seen.is_weights)
    assert stored_weights(tmp_path / "cache") == []


def test_a_folder_is_just_loaded(hub_pool, served, cases, tmp_path) -> None:
    folder = cases(8, 4).folder
    run(hub_pool, 2, folder, folder, str(tmp_path))
    assert not served.seen


def _by_environment(name: str, folder: str, cache: str) -> dict[str, Any]:
    with mock.patch.dict(os.environ, TP_TRANSFORMERS_STREAM="1"):
        return stream(name, folder, cache, tp_stream=None)


def test_the_environment_variable(hub_pool, offer, tmp_path) -> None:
    hub_pool.run(2, _by_environment, "org/model", offer(8, 4), str(tmp_path))
    assert stored_weights(tmp_path) == []


def plan_alone(name: str, cache: str, *arguments: str) -> dict[str, Any]:
    """Run `tp-transformers plan` as one process that torchrun might have started, and starts no group."""
    said = io.StringIO()
    with mock.patch("huggingface_hub.constants.HF_HUB_CACHE", cache), redirect_stdout(said):
        code = main(["plan", name, "--json", *arguments])
    assert not dist.is_initialized()
    return {"code": code, **(json.loads(said.getvalue()) if not code else {})}


def test_a_plan_of_what_is_on_the_hub_reads_headers_alone(hub_pool, served, mixtral, tmp_path) -> None:
    served.add("org/moe", tmp_path)  # nothing; transformers 5.6 looks there for adapters, whatever the revision
    served.add("org/moe", mixtral, revision="old")
    (said,) = hub_pool.run(1, plan_alone, "org/moe", str(tmp_path), "--tp-size", "3", "--revision", "old")
    here = plan_memory(survey(mixtral), 3, context=64)  # as long as it can be
    assert [rank["total_bytes"] for rank in said["ranks"]] == list(here.total_bytes)
    assert said["checkpoint"]["bytes_read"] == here.survey.stock.bytes_read == served.weights_sent() == headers(mixtral)
    assert not stored_weights(tmp_path)
    assert hub_pool.run(1, plan_alone, "org/moe", str(tmp_path), "--tp-size", "3")[0]["code"] == 2  # has no config
