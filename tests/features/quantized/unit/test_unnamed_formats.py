"""Checkpoints of which no config says that they are quantised, and tensors that nothing would read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.support import quantized
from tests.support.comparisons import read_folder, relative
from tests.support.float8 import quantize_folder
from tests.support.models import llama_config, load
from tp_transformers import CheckpointError, UnsupportedError
from tp_transformers.checkpoint.saving.save import STORED_FORM
from tp_transformers.features.planner.dry_load import survey
from tp_transformers.features.planner.memory import plan_memory

TOKENS = torch.arange(8).view(2, 4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in floating point."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(8, 4, intermediate_size=96)).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["fp8", "fp8 by rows", "nvfp4"])
def test_modelopt_is_read_by_its_scales(tmp_path, llama, form) -> None:
    expected = read_folder(llama) | quantized.modelopt(llama, tmp_path / "quantised", form=form)
    model = load(tmp_path / "quantised")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    packed = load(tmp_path / "quantised", dtype=torch.float32, tp_dequantize=False)
    reference = load(tmp_path / "quantised", dtype=torch.float32)
    with torch.no_grad():
        assert relative(packed(TOKENS).logits, reference(TOKENS).logits) < 1e-5  # fp32 sums in another order
    assert packed.tp_report.products
    beside = getattr(STORED_FORM.of(packed), "beside")  # noqa: B009
    assert not [name for name in beside if name.endswith(".weight")]  # no second copy
    with pytest.raises(UnsupportedError, match="one in ModelOpt, which is only read"):
        packed.save_pretrained(tmp_path / "saved")
    planned = survey(str(tmp_path / "quantised"))
    assert planned.is_quantized
    assert not planned.stock.missing
    assert not planned.stock.unexpected
    assert survey(str(tmp_path / "quantised"), packed=True).packed


def test_modelopt_is_read_where_the_config_names_it(tmp_path, llama) -> None:
    expected = quantized.modelopt(llama, tmp_path / "quantised")
    config = json.loads((tmp_path / "quantised" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    state = load(tmp_path / "quantised").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_modelopt_is_what_the_library_makes_of_it(tmp_path, llama, form) -> None:
    pytest.importorskip("modelopt.torch.quantization.qtensor")
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    quantized.modelopt(llama, tmp_path / "quantised", form=form)
    stored, state = read_folder(tmp_path / "quantised"), load(tmp_path / "quantised").state_dict()
    for name, scale in stored.items():
        if name.endswith("weight_scale"):
            weight = name.removesuffix("_scale")
            if form == "nvfp4":
                made = NVFP4QTensor(state[weight].shape, torch.bfloat16, stored[weight])
                sizes = {"double_scale": stored[f"{weight}_scale_2"], "block_sizes": {-1: 16}}
            else:
                made, sizes = FP8QTensor(state[weight].shape, torch.bfloat16, stored[weight]), {}
            expected = made.dequantize(torch.float32, scale=scale, **sizes)
            assert torch.equal(state[weight], expected.bfloat16())


def described(folder: Path, target: Path, **settings: Any) -> Path:
    """The config of a ModelOpt checkpoint and its `hf_quant_config.json`, with other `settings`, without weights."""
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    file = json.loads((folder / "hf_quant_config.json").read_text())
    file["quantization"] |= settings
    (target / "hf_quant_config.json").write_text(json.dumps(file))
    return target


@pytest.mark.parametrize(
    ("form", "algorithm"), [("fp8", "FP8"), ("fp8 by rows", "FP8_PER_CHANNEL_PER_TOKEN"), ("nvfp4", "NVFP4")]
)
def test_hf_quant_config_says_what_modelopt_stores(tmp_path, llama, form, algorithm) -> None:
    quantized.modelopt(llama, tmp_path / "quantised", form=form)
    excluded = ["lm_head", "model.layers.0.self_attn*"]
    folder = described(tmp_path / "quantised", tmp_path / "config", quant_algo=algorithm, exclude_modules=excluded)
    stored = read_folder(tmp_path / "quantised")
    found = survey(str(folder), dtype=torch.float32, packed=True)
    assert found.is_quantized
    named = {name for name in stored if f"{name}_scale" in stored and "layers.0.self_attn" not in name}
    assert found.packed.keys() == named
    planned = {parameter.name: parameter.nbytes for parameter in plan_memory(found, 2).parameters}
    for name in named:
        parts = [stored[f"{name}{suffix}"] for suffix in ("", "_scale", "_scale_2") if f"{name}{suffix}" in stored]
        assert planned[name] == sum(part.nbytes for part in parts), name


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "W8A8_SQ_PER_CHANNEL"])
def test_an_algorithm_of_modelopt_that_is_not_read_is_refused(tmp_path, llama, algorithm) -> None:
    quantized.modelopt(llama, tmp_path / "quantised")
    folder = described(tmp_path / "quantised", tmp_path / "config", quant_algo=algorithm)
    shutil.copy(llama / "model.safetensors", tmp_path / "quantised")
    shutil.copy(folder / "hf_quant_config.json", tmp_path / "quantised")
    for use, where in ((survey, folder), (survey, tmp_path / "quantised"), (load, tmp_path / "quantised")):
        with pytest.raises(UnsupportedError, match=f"quantised with ModelOpt's {algorithm}"):
            use(str(where))


def test_hf_quant_config_that_quantises_no_weight_or_is_cut(tmp_path, llama) -> None:
    quantized.modelopt(llama, tmp_path / "quantised")
    folder = described(tmp_path / "quantised", tmp_path / "config", quant_algo=None)
    assert not survey(str(folder)).is_quantized
    (folder / "hf_quant_config.json").write_text('{"quantization": ')
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json"):
        survey(str(folder))


def without_config(make: Callable[..., Any], **settings: Any) -> Callable[[Path, Path], None]:
    """The maker of a quantised checkpoint of which the config says nothing."""

    def made(folder: Path, target: Path) -> None:
        make(folder, target, **settings)
        shutil.copy(folder / "config.json", target)

    return made


def with_tensors(make: Callable[..., Any], *added: str) -> Callable[[Path, Path], None]:
    """The maker of a quantised checkpoint with tensors beside `q_proj`, which its format does not know."""

    def made(folder: Path, target: Path) -> None:
        make(folder, target)
        more = {f"model.layers.0.self_attn.q_proj.{name}": torch.ones(64) for name in added}
        save_file({**read_folder(target), **more}, target / "model.safetensors", metadata={"format": "pt"})

    return made


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (without_config(quantize_folder, block=(16, 16)), "_proj.weight_scale_inv"),
        (without_config(quantized.gptq), "_proj.qweight"),
        (without_config(quantized.awq), "_proj.qweight"),
        (without_config(quantized.compressed), "_proj.weight_packed"),
        (without_config(quantized.small_groups, form="mxfp8-quantized"), "_proj.weight_scale"),
        (with_tensors(quantized.modelopt, "pre_quant_scale"), "q_proj.pre_quant_scale"),
        (with_tensors(quantized.gptq, "channel_scale"), "q_proj.channel_scale"),
        (with_tensors(quantized.awq, "input_zeros"), "q_proj.input_zeros"),
    ],
)
def test_scales_that_nothing_reads_are_refused(tmp_path, llama, make, says) -> None:
    make(llama, tmp_path / "quantised")
    for use in (load, survey):
        with pytest.raises(UnsupportedError, match="which nothing would read") as caught:
            use(str(tmp_path / "quantised"))
        assert says in str(caught.value)


def test_float8_without_scales_is_read_as_transformers_reads_it(tmp_path, llama) -> None:
    tensors = read_folder(llama)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    shutil.copytree(llama, tmp_path / "mixed")
    save_file(tensors, tmp_path / "mixed" / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed", dtype=torch.bfloat16).state_dict()
    assert torch.equal(load(tmp_path / "mixed", dtype=torch.bfloat16).state_dict()[name], reference[name])


def overlapping(folder: Path, target: Path) -> quantized.Tensors:
    """compressed-tensors with zero points; of two groups, the second alone describes what is stored."""
    expected = quantized.compressed(folder, target, bits=4, group=16, symmetric=False)
    config = json.loads((target / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    other = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    config["quantization_config"]["config_groups"] = {
        "first": {"targets": ["Linear", "q_proj"], "weights": other},
        "second": {**groups["group_0"], "targets": ["re:.*layers.*"]},
    }
    (target / "config.json").write_text(json.dumps(config))
    return expected


def claimed_in_order(folder: Path, target: Path) -> quantized.Tensors:
    """GPTQ with a `g_idx` in any order, which its config denies."""
    expected = quantized.gptq(folder, target, desc_act=True)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False
    (target / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("make", [overlapping, claimed_in_order])
def test_the_tensors_of_a_module_decide(tmp_path, llama, make) -> None:
    expected = make(llama, tmp_path / "quantised")
    model = load(tmp_path / "quantised", dtype=torch.float32)
    state = model.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor.float()), name
    packed = load(tmp_path / "quantised", dtype=torch.float32, tp_dequantize=False)
    with torch.no_grad():
        assert relative(packed(TOKENS).logits, model(TOKENS).logits) < 1e-5  # fp32 sums in another order
    packed.save_pretrained(tmp_path / "saved")
    stored, saved = read_folder(tmp_path / "quantised"), read_folder(tmp_path / "saved")
    assert stored.keys() == saved.keys()
    assert all(torch.equal(stored[name], saved[name]) for name in stored)


def test_scales_of_the_cache_are_saved(tmp_path, llama) -> None:
    quantize_folder(llama, tmp_path / "float8", (16, 16))
    tensors = read_folder(tmp_path / "float8")
    scales = {
        f"model.layers.0.self_attn.{name}": torch.tensor([index + 1.5])
        for index, name in enumerate(("k_scale", "v_scale", "k_proj.k_scale", "q_proj.input_scale"))
    }
    save_file(tensors | scales, tmp_path / "float8" / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path / "float8", tp_dequantize=False).save_pretrained(tmp_path / "saved")
    saved = read_folder(tmp_path / "saved")
    assert saved.keys() == (tensors | scales).keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in scales.items())
