"""Which quantised checkpoints can be loaded, what their tensors are then, and how the others are refused."""

from __future__ import annotations

import gc
import importlib.util
import json
import shutil
import weakref
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

from tests.support import quantized
from tests.support.comparisons import equal_parameters
from tests.support.float8 import quantize_folder
from tests.support.models import llama_config, load
from tp_transformers import CheckpointError, PlanError, UnsupportedError
from tp_transformers.features.quantized.bundle import Decoded
from tp_transformers.features.quantized.compressed import Compressed
from tp_transformers.features.quantized.float8 import Float8
from tp_transformers.features.quantized.format import of_weights
from tp_transformers.features.quantized.mxfp4 import Mxfp4
from tp_transformers.features.quantized.words import Awq, Gptq
from tp_transformers.loading import memory
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
def test_weights_are_those_of_transformers(tmp_path, name, block) -> None:
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


def test_the_callers_config_stays(tmp_path, llama) -> None:
    expected = quantize_folder(llama, tmp_path / "float8", (16, 16))
    config = AutoConfig.from_pretrained(tmp_path / "float8")
    undone = FineGrainedFP8Config(dequantize=True)
    model = load(tmp_path / "float8", config=config, quantization_config=undone, dtype=torch.float32)
    assert config.quantization_config["weight_block_size"] == [16, 16]
    assert not hasattr(model.config, "quantization_config")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[name], expected[name])


def compressed(format: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": None, **weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "hqq", "bits": 4}, "hqq"),
        ({"quant_method": "gguf"}, "gguf"),
        ({"quant_method": "torchao", "quant_type": {}}, "with quantization_config=TorchAoConfig(...)"),
        ({"quant_method": "gptq", "bits": 5}, "GPTQ in 5 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the version marlin"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}, "+:.*mlp": {"bits": 5}}},
            "GPTQ in 5 bits",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"mlp(": {"bits": 8}}}, "settings for 'mlp('"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ in 4 bits, in the version gemv"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "without zero points"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "of bfloat16"),
        ({"quant_method": "of next year"}, "of next year"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "experts in fp4"),
        (compressed(format="marlin-24", num_bits=4, type="float"), "the format marlin-24"),
        (compressed(strategy="tensor_group"), "scales by tensor_group"),
        (compressed(group_size=32, actorder="group"), "scales by group ordered by group"),
        (compressed(num_bits=4, type="float"), "float of 4 bits"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity (sparse-24-bitmask)"),
        ({**compressed(), "transform_config": {"config_groups": {"r1": {}}}}, "with transforms"),
        ({**compressed(), "quantization_status": "frozen"}, "the status frozen"),
    ],
)
def test_others_are_refused_by_name(tmp_path, llama, settings, says) -> None:
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
def test_nothing_is_quantised(llama, asked, says) -> None:
    asked = asked or {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(UnsupportedError, match="tp_plan with quantization_config") as caught:
        load(llama, quantization_config=asked)
    assert says in str(caught.value)


def test_packed_and_undone_are_not_both(llama) -> None:
    with pytest.raises(PlanError, match="both tp_dequantize=False and quantization_config"):
        load(llama, quantization_config=FineGrainedFP8Config(dequantize=True), tp_dequantize=False)


@pytest.mark.parametrize("block", [(16, 16), None])
def test_float8_stays_packed(tmp_path, llama, block, caplog) -> None:
    quantize_folder(llama, tmp_path / "float8", block)
    with caplog.at_level("INFO", logger="tp_transformers"):
        model = load(tmp_path / "float8", dtype=torch.float32, tp_dequantize=False)
    assert [record.levelname for record in caplog.records if "is in FP8, and stays packed" in record.message] == [
        "INFO"
    ]
    dense = load(tmp_path / "float8", dtype=torch.float32)
    tokens = torch.arange(8).view(2, 4)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, dense(tokens).logits)
    assert model.get_memory_footprint() < 0.6 * dense.get_memory_footprint()


FLOAT8 = torch.zeros(20, 20, dtype=torch.float8_e4m3fn)
PACKED = torch.zeros(6, 8, dtype=torch.int32)  # 64 columns of 4 bits
WORDS = torch.zeros(8, 16, dtype=torch.int32)  # GPTQ: 64 features in, 16 out
GPTQ = {
    "qweight": WORDS,
    "qzeros": torch.zeros(2, 2, dtype=torch.int32),
    "scales": torch.ones(2, 16).half(),
    "g_idx": torch.arange(64) // 32,
}
AWQ = {
    "qweight": torch.zeros(64, 2, dtype=torch.int32),
    "qzeros": torch.zeros(2, 2, dtype=torch.int32),
    "scales": GPTQ["scales"],
}
IN_ORDER, AS_STORED = Gptq(4, 32, True, True), Gptq(4, 32, False, True)
BLOCKS, GROUPS = Float8((16, 16)), Compressed.of(compressed(group_size=16))


@pytest.mark.parametrize(
    ("form", "tensors", "says"),
    [
        (BLOCKS, {"weight": FLOAT8}, "tensor a.weight: got torch.float8_e4m3fn without a.weight_scale_inv"),
        (BLOCKS, {"weight": FLOAT8, "weight_scale_inv": torch.ones(1, 2)}, "scales of shape (1, 2)"),
        (BLOCKS, {"weight": FLOAT8, "weight_scale_inv": torch.ones(2)}, "scales of shape (1, 2)"),
        (BLOCKS, {"weight": FLOAT8[0], "weight_scale_inv": torch.ones(2)}, "of shape (20,) with scales"),
        (BLOCKS, {"weight": FLOAT8.to(torch.int8), "weight_scale_inv": torch.ones(2, 2)}, "torch.int8 of shape"),
        (BLOCKS, {"weight": FLOAT8, "weight_scale_inv": torch.ones(2, 2).byte()}, "scales in torch.uint8"),
        (GROUPS, {"weight_packed": PACKED}, "a.weight_scale: got no such tensor"),
        (GROUPS, {"weight_packed": PACKED, "weight_scale": torch.ones(6, 3)}, "values of shape (6, 8), not (6, 6)"),
        (GROUPS, {"weight_packed": PACKED, "weight_scale": torch.ones(5, 4)}, "scales of shape (5, 4), not (6, 4)"),
        (GROUPS, {"weight_packed": PACKED, "weight_scale": PACKED[:, :4]}, "torch.int32 of shape (6, 4)"),
        (GROUPS, {"weight": PACKED.to(torch.int8), "weight_scale": torch.ones(6, 4)}, "a.weight_packed: got no"),
        (Mxfp4(), {"blocks": torch.zeros(2, 4, 3, 16, dtype=torch.uint8)}, "no such tensor"),
        (IN_ORDER, GPTQ | {"g_idx": GPTQ["g_idx"] + 1}, "got groups from 1 to 2, expected those from 0"),
        (IN_ORDER, GPTQ | {"g_idx": GPTQ["g_idx"] - 1}, "got groups from -1 to 0"),
        (IN_ORDER, GPTQ | {"g_idx": None}, "tensor a.g_idx: got no such tensor"),
        (AS_STORED, GPTQ | {"scales": None}, "tensor a.scales: got no such tensor"),
        (AS_STORED, GPTQ | {"qzeros": None}, "tensor a.qzeros: got no such tensor"),
        (AS_STORED, GPTQ | {"qweight": None}, "tensor a.qweight: got no such tensor"),
        (Gptq(4, 16, False, True), GPTQ, "scales of shape (2, 16), not (4, 16)"),
        (AS_STORED, GPTQ | {"scales": GPTQ["scales"].int()}, "got torch.int32 of shape (2, 16)"),
        (AS_STORED, GPTQ | {"scales": GPTQ["scales"][:, :15]}, "scales of shape (2, 15), not (2, 16)"),
        (Awq(group=32), AWQ | {"scales": None}, "tensor a.scales: got no such tensor"),
        (Awq(group=32), AWQ | {"qzeros": None}, "tensor a.qzeros: got no such tensor"),
        (Awq(group=32), AWQ | {"qweight": None}, "got zero points of no weight"),
        (Awq(group=16), AWQ, "scales of shape (2, 16), not (4, 16)"),
        (Awq(group=32), AWQ | {"qzeros": AWQ["qzeros"].half()}, "got torch.float16 of shape (2, 2)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(form, tensors, says) -> None:
    join = "_" if isinstance(form, Mxfp4) else "."
    given = {f"a{join}{name}": Resident(tensor) for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=r"tensor a[._]") as caught:
        form.dequantized(given)
    assert says in str(caught.value)


def test_scales_are_taken_with_their_weights_alone() -> None:
    scales = torch.tensor([[2.0, 4.0], [8.0, 16.0]])
    tensors = {
        "a.weight": (FLOAT8.float() + 1).to(torch.float8_e5m2),
        "a.weight_scale_inv": scales.to(torch.float8_e8m0fnu),
        "a.activation_scale": torch.ones(()),
        "a.k_scale": torch.ones(()),
        "a.bias": torch.ones(20),
        "b.activation_scale": torch.ones(()),
        "c.weight_scale_inv": torch.ones(1),
        "d.weight": torch.ones(3, 20, 20).to(torch.float8_e4m3fn),
        "d.weight_scale_inv": torch.full((1,), 3.0),
    }
    stored = of_weights({name: Resident(tensor) for name, tensor in tensors.items()}, ["b.activation_scale"])
    made = Float8((16, 16)).dequantized(stored)
    assert list(made) == ["a.weight", "a.bias", "b.activation_scale", "c.weight_scale_inv", "d.weight"]
    value = made["a.weight"].materialize()
    assert torch.equal(made["d.weight"].select(0, [(1, 3)]).materialize(), torch.full((2, 20, 20), 3.0))
    assert [value[0, 0], value[0, 16], value[16, 15], value[19, 19]] == [2, 4, 8, 16]


def test_rules_of_gptq_count_in_their_order() -> None:
    rules = {"-:.*k_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": -1}, r".*\.mlp\.": {"desc_act": True}}
    form = Gptq.of({"bits": 4, "group_size": 32, "dynamic": rules})
    found = [form.of_module(f"model.layers.0.{name}") for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.up_proj")]
    assert [(each.bits, each.group, each.ordered) for each in found] == [
        (4, 32, False),
        (8, None, False),
        (4, 32, True),
    ]
    orders = {f"a.mlp.{name}": Resident(FLOAT8) for name in ("up_proj.g_idx", "up_proj.scales")}
    assert form.read_first(orders) == ["a.mlp.up_proj.g_idx"]


def test_every_module_has_its_group() -> None:
    """Modules that a group names have its scheme, others that of a group for a class; activations have none."""
    settings = compressed(num_bits=8, strategy="channel")
    settings["config_groups"]["group_1"] = {
        "targets": ["re:.*experts.*"],
        "weights": {"num_bits": 4, "group_size": 8, "strategy": "group"},
    }
    named = {"targets": ["m.mlp.down"], "weights": {"num_bits": 4, "strategy": "channel"}}
    settings["config_groups"] = {"of_one_module": named, **settings["config_groups"]}
    words = torch.full((2, 2), 0x11111111, dtype=torch.int32)
    tensors = {
        "m.q.weight_packed": words,
        "m.q.weight_scale": torch.full((2, 1), 2.0),
        "m.q.weight_shape": torch.tensor([2, 7]),
        "m.q.input_scale": torch.ones(1),
        "m.experts.0.weight_packed": words,
        "m.experts.0.weight_scale": torch.full((2, 2), 2.0),
        "m.norm.weight": torch.ones(7),
    }
    stored = of_weights({name: Resident(tensor) for name, tensor in tensors.items()}, ())
    made = Compressed.of(settings).dequantized(stored)
    assert list(made) == ["m.q.weight", "m.experts.0.weight", "m.norm.weight"]
    assert torch.equal(made["m.q.weight"].materialize(), torch.full((2, 7), 2.0 * (0x11 - 128)))
    assert torch.equal(made["m.experts.0.weight"].materialize(), torch.full((2, 16), 2.0 * (1 - 8)))


def test_few_weights_are_packed_and_dequantised_at_once(tmp_path, llama, monkeypatch) -> None:
    quantized.compressed(llama, tmp_path / "packed", bits=8)
    whole = load(tmp_path / "packed")
    seen = []

    def split(shards: Any, values: Any) -> Any:
        gc.collect()
        alive = sum(each() is not None for each in parts)
        stored, computed = split_reads(shards, values)
        if values and all(value.is_meta for value in values.values()):  # bytes of later rounds are counted
            return stored, computed
        decoded = [step for step, _ in computed if isinstance(step, Decoded)]
        seen.append((len(decoded), alive))
        parts.extend(map(weakref.ref, decoded))
        return stored, computed

    parts: list[weakref.ref[Decoded]] = []
    split_reads = memory.split_reads
    monkeypatch.setattr(memory, "ROUND_BYTES", 1)
    monkeypatch.setattr(memory, "split_reads", split)
    model = load(tmp_path / "packed")
    assert seen == [(0, 0), *[(1, 0)] * 14], "what was packed is gone before the next weight is read"
    assert equal_parameters(whole, model)
