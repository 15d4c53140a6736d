"""Sharding without ranks, held against what ranks save."""

import secrets
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import tp_transformers
from tests.support.architectures import ARCHITECTURES
from tests.support.commands import main
from tests.support.comparisons import read_folder
from tests.support.float8 import quantize_folder
from tests.support.models import llama_config, load
from tests.support.saving import MANIFEST_NAME
from tests.support.tiers import wide
from tp_transformers import CheckpointError
from tp_transformers.checkpoint import verify_sharded
from tp_transformers.features.presharded import offline
from tp_transformers.features.presharded.offline import shard_checkpoint
from tp_transformers.features.presharded.save import SummedWriter

SAVE = "0123abcd"


def make(name: str) -> Any:
    if name in ARCHITECTURES:
        return ARCHITECTURES[name].make(*ARCHITECTURES[name].variants[0])
    return LlamaForCausalLM(llama_config(9, 3, tie_word_embeddings="tied" in name))


def checkpoint(name: str, folder: Path) -> str:
    """Write a checkpoint, some of them with a twist."""
    torch.manual_seed(0)
    make(name).save_pretrained(folder / "plain", max_shard_size="60KB")
    if name == "llama in FP8":
        quantize_folder(folder / "plain", folder / "float8", (16, 16))
        return str(folder / "float8")
    file = folder / "plain" / "model.safetensors"
    if name.startswith("tied, "):
        tensors = read_folder(folder / "plain")
        for part in (folder / "plain").glob("model*"):
            part.unlink()
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + ("differently" in name)
        save_file(tensors, file, metadata={"format": "pt"})
    return str(folder / "plain")


def save(folder: str, target: str, dtype: str) -> None:
    with mock.patch.object(secrets, "token_hex", return_value=SAVE):
        tp_transformers.save_sharded(load(folder, dtype=dtype), target)


NAMES = ["llama in FP8", "tied", "tied, differently", "mixtral", "deepseek_v3", "llama", "tied, both stored", "gpt_oss"]


@pytest.mark.parametrize("name", wide(NAMES, 5))
def test_files_are_those_that_ranks_save(pool, tmp_path, name, monkeypatch) -> None:
    folder = checkpoint(name, tmp_path)
    dtype = "bfloat16" if name == "mixtral" else "auto"
    pool.run(2, save, folder, str(tmp_path / "ranks"), dtype)
    monkeypatch.setattr(secrets, "token_hex", lambda count: SAVE)
    manifest = shard_checkpoint(folder, tmp_path / "alone", size=2, dtype=dtype)
    files = {path.name: path.read_bytes() for path in (tmp_path / "ranks").iterdir()}
    assert len([name for name in files if name.endswith(".safetensors")]) == 2 == len(manifest.files)
    for path in (tmp_path / "alone").iterdir():
        assert files.pop(path.name) == path.read_bytes(), path.name
    assert not files


def logits(folder: str) -> torch.Tensor:
    model = load(folder)
    return model(torch.arange(7)[None]).logits.detach()


def test_any_number_of_ranks_loads_it(pool, cases, tmp_path, capsys) -> None:
    """By the command, with a tokenizer, and sharded once more for another number of ranks into the same folder."""
    folder, out = cases(9, 3).folder, tmp_path / "out"
    expected = logits(folder)
    tokenizer = Path(folder, "tokenizer.json")
    tokenizer.write_text("{}")
    try:
        assert main(["shard", folder, str(out), "--tp-size", "3"]) == 0
    finally:
        tokenizer.unlink()
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 3
    (said,) = captured.err.splitlines()  # no bar, since it is no terminal
    assert said.startswith(f"tp-transformers shard: sharding {folder} for 3 ranks")
    assert (out / "tokenizer.json").read_text() == "{}"
    for found in pool.run(2, logits, str(out)):
        assert torch.allclose(found, expected, rtol=0, atol=1e-4)  # fp32 sums in another order
    assert main(["shard", str(out), str(out), "--tp-size", "2"]) == 0
    verify_sharded(out)
    assert len(list(out.glob("rank-*"))) == 2
    assert torch.equal(logits(str(out)), expected)


def test_pieces_are_read_one_at_a_time(cases, tmp_path, monkeypatch) -> None:
    """Nothing larger than what one rank holds of a parameter is read, and every byte that is cut only once."""
    read: list[int] = []
    original = offline._Value.read

    def recorded(self: Any, tensor: Any) -> torch.Tensor:
        value = original(self, tensor)
        read.append(value.nbytes)
        return value

    monkeypatch.setattr(offline._Value, "read", recorded)
    manifest = shard_checkpoint(cases(9, 3).folder, tmp_path / "out", size=3)
    largest = max(
        torch.Size(tensor.local_shape(rank)).numel() * tensor.dtype.itemsize
        for tensor in manifest.tensors.values()
        for rank in range(3)
    )
    assert max(read) == largest


def test_a_save_that_breaks_off_leaves_what_was_there(cases, tmp_path, monkeypatch, printed) -> None:
    folder, out = cases(9, 3).folder, tmp_path / "out"
    shard_checkpoint(folder, out, size=2)
    before = sorted(path.name for path in out.iterdir())
    original = SummedWriter.write

    def full(self: SummedWriter, name: str, value: torch.Tensor) -> None:
        if name == "model.norm.weight":
            raise OSError(28, "No space left on device")
        original(self, name, value)

    monkeypatch.setattr(SummedWriter, "write", full)
    for target in (out, tmp_path / "new"):
        assert "No space left on device" in printed("shard", folder, str(target), "--tp-size", "3", code=2)
    assert sorted(path.name for path in out.iterdir()) == before
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    verify_sharded(out)


def test_wrong_requests_are_told(cases, tmp_path, printed) -> None:
    folder = cases(9, 3).folder

    def told(*arguments: str) -> str:
        return printed("shard", *arguments, code=2)

    assert "--tp-size: got 0" in told(folder, str(tmp_path / "out"), "--tp-size", "0")
    assert "expected one with config.json" in told(str(tmp_path / "none"), str(tmp_path / "out"), "--tp-size", "2")
    assert "no.yaml" in told(folder, str(tmp_path / "out"), "--tp-size", "2", "--plan", "no.yaml")
    assert "other weights" in told(folder, folder, "--tp-size", "2")
    assert not (tmp_path / "out").exists()


def test_weights_that_a_load_would_initialise_are_refused(tmp_path) -> None:
    model = LlamaForCausalLM(llama_config(9, 3))
    model.save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not in the checkpoint(.|\n)*lm_head\.weight"):
        shard_checkpoint(str(tmp_path / "plain"), tmp_path / "out", size=2)
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()
