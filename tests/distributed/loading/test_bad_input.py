"""Bad input: one clear error on all ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.support.models import PROMPTS, VOCAB, edited, load
from tests.support.needs import needs


def bad_mesh(folder: str) -> None:
    dist.init_process_group("gloo")
    load(folder, device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")))


def bad_size(folder: str) -> None:
    load(folder, tp_size=3)


def no_rules(folder: str) -> None:
    load(folder, tp_plan={})


@needs("infer")
def test_bad_meshes_and_sizes(pool, cases) -> None:
    folder = cases(8, 4).folder
    for size, function, says in (
        (4, bad_mesh, "MeshError: device_mesh: got 2 axes named ('dp', 'pp')"),
        (2, bad_size, "MeshError: tp_size: got 3, expected 2"),
        (2, no_rules, 'PlanError: tp_plan: got {}, expected "auto", "infer", a name of ours'),
    ):
        assert pool.error(size, function, folder).startswith(says)


SECOND, INDEX = "model-00002-of-00007.safetensors", "model.safetensors.index.json"


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def damage_missing(folder: Path) -> None:
    (folder / SECOND).unlink()


def damage_truncated(folder: Path) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-100])


def damage_header(folder: Path) -> None:
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:8] + b"not json...." + data[20:])


def damage_outside(folder: Path) -> None:
    data = (folder / SECOND).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name]["data_offsets"] = [end + 10**9 for end in header[name]["data_offsets"]]
    text = json.dumps(header).encode()
    (folder / SECOND).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def damage_index_escapes(folder: Path) -> None:
    shutil.copy(folder / SECOND, folder.parent / "stolen.safetensors")
    (folder / INDEX).write_text((folder / INDEX).read_text().replace(SECOND, "../stolen.safetensors"))


def damage_index_lies(folder: Path) -> None:
    change_json(folder / INDEX, lambda index: index["weight_map"].update({"model.layers.7.ghost.weight": SECOND}))


def damage_pickled(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    for path in folder.glob("model*"):
        path.unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def damage_shape(folder: Path) -> None:
    change_json(folder / "config.json", lambda config: config.update(intermediate_size=101))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_missing, "model-00002-of-00007.safetensors: got no such file"),
        (damage_truncated, "truncated"),
        (damage_header, "not JSON"),
        (damage_outside, "inside the file"),
        (damage_index_escapes, "stolen.safetensors"),
        (damage_index_lies, "model.layers.7.ghost.weight: got it in none of the files"),
        (damage_pickled, "save_pretrained"),
        (damage_shape, "got (100, 64), expected (101, 64)"),
    ],
)
def test_damaged_checkpoints(pool, cases, tmp_path, damage, says) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(cases(8, 4).folder, folder)
    damage(folder)
    error = pool.error(2, load, str(folder))
    assert error.startswith("CheckpointError: ")
    assert says in error


def logits_of_prompts(folder: str) -> torch.Tensor:
    return load(folder, dtype=torch.float64)(PROMPTS).logits.detach()


def test_the_way_that_the_error_of_a_pickle_names(pool, cases, tmp_path) -> None:
    folder, new_folder = tmp_path / "checkpoint", tmp_path / "new"
    shutil.copytree(cases(9, 3).folder, folder)
    damage_pickled(folder)
    way = re.search(r"AutoModel\S+\)", pool.error(2, load, str(folder)))
    eval(way[0], {"AutoModelForCausalLM": AutoModelForCausalLM, "folder": folder, "new_folder": new_folder})
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(PROMPTS).logits
    for logits in pool.run(2, logits_of_prompts, str(new_folder)):
        torch.testing.assert_close(logits, whole, rtol=1e-9, atol=1e-9)


def load_with_wrong_rules(folder: str, rules: dict[str, str]) -> None:
    model = load(folder, tp_plan={f"model.layers.*.{name}": strategy for name, strategy in rules.items()})
    model(PROMPTS)


@needs("refusals")
def test_rules_that_do_not_fit_together_are_told_before_the_read(pool, cases, tmp_path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(cases(8, 4).folder, folder)
    for file in folder.glob("*.safetensors"):  # whoever reads a weight fails
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - 8)
    rules = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise_rep"}
    error = pool.error(2, load_with_wrong_rules, str(folder), rules, timeout=60)
    assert "model.layers.*.mlp.gate_proj: it leaves its features sharded, but model.layers.*.mlp.down_proj" in error


def test_what_does_not_fit_in_the_forward_is_told_there(pool, cases) -> None:
    # That an attention's output feeds the next block is not seen in a plan.
    error = pool.error(2, feed_a_shard, cases(8, 4).folder, timeout=60)
    assert error.startswith("PlanError: model.layers.0.mlp.down_proj: got an input of 50 features, expected 100")


def feed_a_shard(folder: str) -> None:
    model = load(folder, tp_plan={"model.layers.*.mlp.down_proj": "rowwise_rep"})
    model.model.layers[0].mlp.down_proj(torch.ones(1, 50))


def look_up_nobodys_id(folder: str) -> None:
    load(folder)(torch.tensor([[3, VOCAB]]))


def test_ids_outside_the_vocabulary_fail_as_in_one_process(pool, cases) -> None:
    error = pool.error(2, look_up_nobodys_id, cases(8, 4).folder, timeout=60)
    assert error.startswith("IndexError: index out of range")


def load_differently(folders: list[str], what: str) -> None:
    rank = int(os.environ["RANK"])
    arguments: dict[str, Any] = {}
    if what == "size" and rank:
        arguments = {"tp_size": 3}
    if what == "device_map" and rank:
        arguments = {"device_map": "auto"}
    if what == "plan" and rank:
        arguments = {"tp_plan": {"model.layers.*.mlp.up_proj": "colwise_rep"}}
    if what == "watch" and rank:
        arguments = {"tp_watch": False}
    load(folders[{"weights": rank, "config": 2 * rank}.get(what, 0)], **arguments)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("size", "MeshError: rank 1: tp_size: got 3, expected 2"),
        ("device_map", "PlanError: rank 1: from_pretrained: got both tp_plan and device_map"),
        ("plan", "MeshError: the plan: got one on rank 0 and another on rank 1"),
        ("config", "MeshError: rms_norm_eps of the model's config: got '1e-06' on rank 0 and '0.001' on rank 1"),
        pytest.param("watch", "MeshError: tp_watch: got True on rank 0 and False on rank 1", marks=needs("watch")),
        pytest.param(
            "weights",
            "CheckpointError: the checkpoint: got another list of files on rank 1 than on rank 0",
            marks=needs("machines"),
        ),
    ],
)
def test_ranks_that_ask_for_different_things_all_stop(pool, cases, tmp_path, what, says) -> None:
    folder = cases(8, 4).folder
    other = edited(folder, tmp_path / "c", lambda tensors: tensors.pop("lm_head.weight"))
    changed = shutil.copytree(folder, tmp_path / "d")
    change_json(changed / "config.json", lambda config: config.update(rms_norm_eps=1e-3))
    assert pool.error(2, load_differently, [folder, other, str(changed)], what, timeout=60).startswith(says)


def load_own(folders: list[str]) -> None:
    load(folders[int(os.environ["RANK"])])


def test_a_fault_on_one_rank_stops_all_with_its_error(pool, cases, tmp_path) -> None:
    good = cases(8, 4).folder
    bad = tmp_path / "checkpoint"
    shutil.copytree(good, bad)
    damage_truncated(bad)
    error = pool.error(3, load_own, [good, str(bad), good], timeout=60)
    assert error.startswith("CheckpointError: rank 1: ")
    assert "truncated" in error


def load_with_own_plan(folder: str) -> None:
    load(folder, tp_plan={"model.nope": "colwise"} if os.environ["RANK"] == "1" else "auto")


def test_a_plan_that_does_not_fit_on_one_rank_stops_all(pool, cases) -> None:
    error = pool.error(4, load_with_own_plan, cases(8, 1).folder, timeout=60)
    assert error.startswith("PlanError: rank 1: tp_plan does not fit")


def test_a_fault_in_transformers_on_one_rank_stops_all(pool, cases, tmp_path) -> None:
    good = cases(8, 4).folder
    error = pool.error(3, load_own, [good, str(tmp_path), good], timeout=60)
    assert error.startswith("RemoteRankError: rank 1: ")
