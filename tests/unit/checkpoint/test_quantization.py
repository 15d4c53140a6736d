"""Which quantised checkpoints can be loaded, what their tensors are then, and how the others are refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    LlamaForCausalLM,
    Qwen3MoeConfig,
)

from tests.support.float8 import quantize_folder
from tests.support.models import llama_config, load
from tp_transformers.checkpoint.quantization.float8 import Float8
from tp_transformers.errors import CheckpointError, UnsupportedError
from tp_transformers.slices.lazy import Resident

CONFIGS = {
    "llama": llama_config(8, 4, intermediate_size=96),
    "qwen3_moe": Qwen3MoeConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in floating point."""
    folder = tmp_path_factory.mktemp("plain")
    LlamaForCausalLM(CONFIGS["llama"]).save_pretrained(folder)
    return folder


def claim(folder: Path, target: Path, **settings: Any) -> Path:
    """A copy of a checkpoint of which the config says that it is quantised."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return target


@pytest.mark.parametrize("block", [(16, 16), None])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_transformers(tmp_path: Path, name: str, block: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path / "plain")
    expected = quantize_folder(tmp_path / "plain", tmp_path / "float8", block)
    models = {dtype: load(tmp_path / "float8", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    for dtype, model in models.items():
        assert {param.dtype for param in model.parameters()} == {dtype}
        assert not hasattr(model.config, "quantization_config")
        model.save_pretrained(tmp_path / str(dtype))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "torch.float32").state_dict()
    for name_, tensor in models[torch.float32].state_dict().items():
        assert torch.equal(tensor, saved[name_])
        if name_ in expected:
            assert torch.equal(tensor, expected[name_])
    # Releases before 5.17 need a GPU's compiler for this, and know no scales of experts and no single ones of them.
    knows = (5, 17) if block else (5, 23)
    if Version(transformers.__version__).release[:2] < knows:
        return
    undone = FineGrainedFP8Config(dequantize=True)
    for dtype, model in models.items():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "float8", dtype=dtype, quantization_config=undone)
        for (mine, param), (other, reference) in zip(model.named_parameters(), theirs.named_parameters(), strict=True):
            assert mine == other
            assert torch.equal(param, reference.to(dtype)), mine


def test_the_callers_config_stays(tmp_path: Path, llama: Path) -> None:
    expected = quantize_folder(llama, tmp_path / "float8", (16, 16))
    config = AutoConfig.from_pretrained(tmp_path / "float8")
    undone = FineGrainedFP8Config(dequantize=True)
    model = load(tmp_path / "float8", config=config, quantization_config=undone, dtype=torch.float32)
    assert config.quantization_config["weight_block_size"] == [16, 16]
    assert not hasattr(model.config, "quantization_config")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[name], expected[name])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes (4bit)"),
        ({"load_in_8bit": True}, "bitsandbytes (8bit)"),
        ({"quant_method": "mxfp4"}, "Mxfp4Config(dequantize=True)"),
        ({"quant_method": "of next year"}, "of next year"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "experts in fp4"),
    ],
)
def test_others_are_refused_by_name(tmp_path: Path, llama: Path, settings: dict[str, Any], says: str) -> None:
    folder = claim(llama, tmp_path / "quantised", **settings)
    (folder / "model.safetensors").unlink()  # no weight is looked at
    with pytest.raises(UnsupportedError, match="quantised with") as caught:
        load(folder)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (FineGrainedFP8Config(), "for fp8"),
        (FineGrainedFP8Config(dequantize=True), "for fp8"),
        (BitsAndBytesConfig(load_in_4bit=True) if importlib.util.find_spec("bitsandbytes") else None, "(4bit)"),
        ({"quant_method": "gptq", "bits": 4}, "for gptq"),
    ],
)
def test_nothing_is_quantised(llama: Path, asked: Any, says: str) -> None:
    asked = asked or {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(UnsupportedError, match="tp_plan with quantization_config") as caught:
        load(llama, quantization_config=asked)
    assert says in str(caught.value)


def test_gguf_is_refused(llama: Path) -> None:
    with pytest.raises(UnsupportedError, match="both tp_plan and gguf_file"):
        load(llama, gguf_file="model.gguf")


FLOAT8 = torch.zeros(20, 20, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"a.weight": FLOAT8}, "torch.float8_e4m3fn without a.weight_scale_inv"),
        ({"a.weight": FLOAT8, "a.weight_scale_inv": torch.ones(1, 2)}, "scales of shape (1, 2)"),
        ({"a.weight": FLOAT8, "a.weight_scale_inv": torch.ones(2)}, "scales of shape (1, 2)"),
        ({"a.weight": FLOAT8[0], "a.weight_scale_inv": torch.ones(2)}, "of shape (20,) with scales"),
        ({"a.weight": FLOAT8.to(torch.int8), "a.weight_scale_inv": torch.ones(2, 2)}, "torch.int8 of shape"),
        ({"a.weight": FLOAT8, "a.weight_scale_inv": torch.ones(2, 2).to(torch.uint8)}, "scales in torch.uint8"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tensors: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(CheckpointError, match=r"tensor a\.weight") as caught:
        Float8((16, 16)).dequantized({name: Resident(tensor) for name, tensor in tensors.items()})
    assert says in str(caught.value)


def test_scales_are_taken_with_their_weights_alone() -> None:
    scales = torch.tensor([[2.0, 4.0], [8.0, 16.0]])
    tensors = {
        "a.weight": (FLOAT8.float() + 1).to(torch.float8_e5m2),
        "a.weight_scale_inv": scales.to(torch.float8_e8m0fnu),
        "a.activation_scale": torch.ones(()),
        "a.bias": torch.ones(20),
        "b.activation_scale": torch.ones(()),
        "c.weight_scale_inv": torch.ones(1),
        "d.weight": torch.ones(3, 20, 20).to(torch.float8_e4m3fn),
        "d.weight_scale_inv": torch.full((1,), 3.0),
    }
    made = Float8((16, 16)).dequantized({name: Resident(tensor) for name, tensor in tensors.items()})
    assert list(made) == ["a.weight", "a.bias", "b.activation_scale", "c.weight_scale_inv", "d.weight"]
    value = made["a.weight"].materialize()
    assert torch.equal(made["d.weight"].select(0, [(1, 3)]).materialize(), torch.full((2, 20, 20), 3.0))
    assert [value[0, 0], value[0, 16], value[16, 15], value[19, 19]] == [2, 4, 8, 16]
