"""Saves of models with packed weights: the tensors of the checkpoint that was loaded, bit by bit."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import tp_transformers
from tests.features.quantized.distributed.test_quantized import VARIANTS, packed_folder
from tests.support.comparisons import read_folder, relative
from tests.support.float8 import quantize_folder
from tests.support.models import load, logits_of
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.features.packed.integers import Int4Cpu
from tp_transformers.features.presharded.offline import shard_checkpoint

ROUNDING = 3e-2  # of bfloat16, in another order

FORMATS = {
    **VARIANTS,
    "float8 by blocks": partial(quantize_folder, block=(16, 16)),
    "float8 by weights": partial(quantize_folder, block=None),
}
SAVED = FORMATS.keys() - {"mxfp4", "nvfp4 of ModelOpt"}
"""Formats of linears that are written as they are read."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory):
    """`packed(name, variant)`: the folder of a quantised checkpoint."""
    return cache(lambda name, variant: packed_folder(tmp_path_factory.mktemp("packed"), name, FORMATS[variant])[0])


def save(folder: str, to: str, sharded: str | None = None) -> None:
    model = load(folder, dtype=torch.bfloat16, tp_dequantize=False)
    expected = logits_of(model)
    model.save_pretrained(to)
    if sharded is not None:
        tp_transformers.save_sharded(model, sharded)
    assert torch.equal(logits_of(model), expected)
    assert not hasattr(model.config, "quantization_config")


def check_saved(folder: Path, saved: Path) -> None:
    before, after = read_folder(folder), read_folder(saved)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)), name
    settings = [json.loads((each / "config.json").read_text())["quantization_config"] for each in (folder, saved)]
    assert settings[0] == settings[1]


@pytest.mark.parametrize(
    ("name", "variant", "size", "again"),
    wide(
        [
            ("gpt_oss", "mxfp4", 3, 2),
            ("llama", "int4 with zero points", 2, 3),
            ("llama", "gptq", 3, 2),
            *(("llama", variant, size, 4 - size) for variant in sorted(SAVED) for size in (1, 2, 3)),
            *(("gpt_oss", "mxfp4", size, 4 - size) for size in (1, 2)),
            ("qwen3_moe", "int4 with zero points", 3, 2),
            ("qwen3_moe", "awq", 2, 4),
            ("qwen3_moe", "gptq in order", 3, 1),
            ("qwen3_moe", "float8 by weights", 2, 3),
        ],
        1,
    ),
)
def test_a_save_is_the_checkpoint_that_was_loaded(pool, packed, tmp_path, name, variant, size, again) -> None:
    folder = packed(name, variant)
    pool.run(size, save, str(folder), str(tmp_path / "saved"), str(tmp_path / "sharded"))
    check_saved(folder, tmp_path / "saved")
    pool.run(again, save, str(tmp_path / "sharded"), str(tmp_path / "again"))
    check_saved(folder, tmp_path / "again")
    # One process makes the same files as the ranks.
    shard_checkpoint(str(folder), tmp_path / "offline", size=size, dtype=torch.bfloat16, tp_dequantize=False)
    for path in (tmp_path / "sharded").glob("rank-*"):
        other = next((tmp_path / "offline").glob(f"{path.name[:19]}*"))
        mine, theirs = read_file(path), read_file(other)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[each], theirs[each]) for each in mine)


@pytest.fixture
def gptq(packed) -> str:
    """A checkpoint in integers of 4 bits."""
    return str(packed("llama", "gptq"))


@on_ranks()
def test_a_rank_that_cannot_convert_its_integers_stops_all(gptq, tmp_path) -> None:
    """Rank 1 alone cannot convert its integers back."""
    model = load(gptq, dtype=torch.bfloat16, tp_dequantize=False)
    with ExitStack() as stack:
        if os.environ["RANK"] == "1":
            stack.enter_context(mock.patch.object(Int4Cpu, "unpack", side_effect=MemoryError("no room for integers")))
        for save_to in (model.save_pretrained, partial(tp_transformers.save_sharded, model)):
            with pytest.raises(Exception, match="no room for integers") as raised:
                save_to(tmp_path / "saved")
            assert "process group" not in str(raised.value)
    logits_of(model)  # the ranks go on together
    assert not [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.json")]


def read_file(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in load_file(path).items()}


def tie(tensors: dict[str, torch.Tensor]) -> None:
    """Quantise the embedding, which the head shares, with what a linear of its shape has."""
    torch.manual_seed(1)
    name, (rows, columns) = "model.embed_tokens.weight", tensors.pop("model.embed_tokens.weight").shape
    tensors.pop("lm_head.weight", None)
    tensors[f"{name}_packed"] = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32)
    tensors[f"{name}_scale"] = torch.rand(rows, columns // 32).bfloat16()
    tensors[f"{name}_shape"] = torch.tensor([rows, columns])


def undo_one_expert(tensors: dict[str, torch.Tensor]) -> None:
    """Leave the weights of one expert, which is merged with others, in floating point."""
    prefix = "model.layers.0.mlp.experts.1.down_proj.weight"
    rows, columns = tensors.pop(f"{prefix}_shape").tolist()
    del tensors[f"{prefix}_packed"], tensors[f"{prefix}_scale"]
    tensors[prefix] = torch.rand(rows, columns).bfloat16()


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("llama", tie, "the quantised model.embed_tokens.weight dequantised"),
        ("qwen3_moe", undo_one_expert, "the quantised model.layers.0.mlp.experts.down_proj dequantised"),
    ],
)
@pytest.mark.slow
@on_ranks()
def test_quantised_weights_that_are_not_packed_are_not_saved(changed, tmp_path, says) -> None:
    """They compute as ever; a save says so before anything is written."""
    model, dense = load(changed, dtype=torch.bfloat16, tp_dequantize=False), load(changed, dtype=torch.bfloat16)
    assert relative(logits_of(model).float(), logits_of(dense).float()) < ROUNDING
    for save_to in (model.save_pretrained, partial(tp_transformers.save_sharded, model)):
        with pytest.raises(tp_transformers.UnsupportedError, match=f"{says}.*tp_dequantize=True"):
            save_to(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.fixture
def changed(packed, tmp_path, name, change) -> Path:
    """A checkpoint some of whose quantised weights are not packed."""
    folder, target = packed(name, "int4 by groups"), tmp_path / "changed"
    tensors = read_folder(folder)
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": name == "llama"}
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
    (target / "config.json").write_text(json.dumps(config))
    return target
