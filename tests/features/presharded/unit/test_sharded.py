"""Pre-sharded checkpoints in one process: saved, loaded, replaced and refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import tp_transformers
from tests.support.comparisons import assert_same_files, equal_parameters
from tests.support.models import load
from tp_transformers import CheckpointError, UnsupportedError, save_sharded
from tp_transformers.checkpoint import verify_sharded
from tp_transformers.features.presharded.manifest import Manifest
from tp_transformers.features.presharded.save import SummedWriter


@pytest.fixture
def saved(cases: Any, tmp_path: Path) -> tuple[str, Path]:
    """A checkpoint, and the same in one shard."""
    folder = cases(9, 3).folder
    save_sharded(load(folder), tmp_path / "sharded")
    return folder, tmp_path / "sharded"


def test_one_process_saves_and_loads(saved, tmp_path) -> None:
    folder, sharded = saved
    model, info = load(sharded, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    plain = LlamaForCausalLM.from_pretrained(folder)
    assert equal_parameters(model, plain)
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    (file,) = sharded.glob("rank-*.safetensors")
    assert model.tp_report.bytes_read + model.tp_report.mapped == file.stat().st_size
    load(Path(folder).parent, subfolder=Path(folder).name)  # an ordinary one, as ever
    load(sharded.parent, subfolder=sharded.name).save_pretrained(tmp_path / "back", max_shard_size="60KB")
    assert_same_files(folder, str(tmp_path / "back"))


def test_nothing_is_renamed_again(saved, tmp_path) -> None:
    folder, sharded = saved
    model, info = load(
        sharded, key_mapping={"^lm_head": "model.head", "gate_proj": "up_proj"}, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    plain = LlamaForCausalLM.from_pretrained(folder)
    assert equal_parameters(model, plain)
    model.save_pretrained(tmp_path / "back", max_shard_size="60KB")
    assert_same_files(folder, str(tmp_path / "back"))


def test_dtypes(saved, tmp_path) -> None:
    folder, sharded = saved
    plain = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    cast = load(sharded, dtype=torch.bfloat16)
    assert equal_parameters(cast, plain)
    save_sharded(cast, tmp_path / "cast")
    edit_config = json.loads((tmp_path / "cast" / "config.json").read_text())
    assert edit_config.pop("dtype") == "bfloat16"
    assert load(tmp_path / "cast", dtype="auto").dtype == torch.bfloat16
    (tmp_path / "cast" / "config.json").write_text(json.dumps(edit_config))
    assert load(tmp_path / "cast", dtype="auto").dtype == torch.bfloat16, "the manifest knows it too"
    assert load(tmp_path / "cast", dtype=torch.float32).dtype == torch.float32


def test_a_base_model_is_loaded_too(saved) -> None:
    folder, sharded = saved
    base, plain = load(sharded, AutoModel), AutoModel.from_pretrained(folder)
    assert equal_parameters(base, plain)


def test_without_a_plan_there_is_an_error_and_no_model(saved) -> None:
    _, sharded = saved
    with tp_transformers.enable():
        for auto in (AutoModelForCausalLM, LlamaForCausalLM):
            with pytest.raises(CheckpointError, match=r"pre-sharded checkpoint without tp_plan.*tp_plan=\"auto\""):
                auto.from_pretrained(sharded)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(sharded)


def test_ordinary_weights_beside_sharded_ones_are_refused(saved, tmp_path) -> None:
    folder, sharded = saved
    model = load(sharded)
    with pytest.raises(CheckpointError, match=r"got a folder that holds model\.safetensors\.index\.json"):
        save_sharded(model, folder)
    assert not [*Path(folder).glob("*rank-*")]
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(sharded)
    with pytest.raises(CheckpointError, match=r"both model\.safetensors\.index\.sharded\.json and model\.safetensors"):
        load(sharded)
    with tp_transformers.enable():
        LlamaForCausalLM.from_pretrained(sharded)  # without a plan there is no doubt what is meant


def test_a_plain_model_is_refused(cases, tmp_path) -> None:
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM that was loaded without tp_plan"):
        save_sharded(LlamaForCausalLM.from_pretrained(cases(8, 4).folder), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_save_replaces_the_one_before_it(saved, monkeypatch) -> None:
    _, sharded = saved
    before = sorted(path.name for path in sharded.iterdir())
    (sharded / "rank-00007-of-00008-0123abcd.safetensors.tmp").write_bytes(b"of a save that was killed")
    (sharded / "notes-of-mine.safetensors").write_bytes(b"")
    model = load(sharded)
    with torch.no_grad():
        model.lm_head.weight.zero_()

    def fails(*args: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(SummedWriter, "write", fails)
        with pytest.raises(OSError, match="no space"):
            save_sharded(model, sharded)
    assert load(sharded).lm_head.weight.abs().max() > 0, "what was there is still there"
    save_sharded(model, sharded)
    assert load(sharded).lm_head.weight.abs().max() == 0
    names = sorted(path.name for path in sharded.iterdir())
    assert len(names) == len(before) + 1
    assert "notes-of-mine.safetensors" in names
    assert len([*sharded.glob("rank-*")]) == 1
    verify_sharded(sharded)


def test_the_manifest_says_where_the_model_is_from(saved, tmp_path) -> None:
    folder, sharded = saved
    commit = "5f1" + "0" * 37
    cached = tmp_path / "models--tiny" / "snapshots" / commit  # as the Hub's cache has it
    shutil.copytree(folder, cached)
    save_sharded(load(cached), tmp_path / "from-cache")
    save_sharded(load(tmp_path / "from-cache"), tmp_path / "again")
    for target in ("from-cache", "again"):
        manifest = Manifest.find(tmp_path / target)
        assert manifest.source == {"name": str(cached), "commit_hash": commit}
    manifest = Manifest.find(sharded)
    assert manifest.source == {"name": folder, "commit_hash": None}
    assert manifest.dtype == "float32"
    assert manifest.plan["model.layers.*.self_attn.q_proj"] == "colwise"
