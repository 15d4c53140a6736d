"""What a load would find, and what every rank would hold, said without a weight."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen3Config, T5ForConditionalGeneration, modeling_layers

from tests.support.architectures import ARCHITECTURES
from tests.support.float8 import quantize_folder
from tests.support.models import VOCAB, headers, llama_config, load
from tests.support.quantized import compressed
from tests.support.tiers import sampled, wide
from tests.support.tiny_mixers import MIXERS, states
from tp_transformers import CheckpointError, PlanError
from tp_transformers.features.planner.dry_load import survey
from tp_transformers.features.planner.fit import smallest_size
from tp_transformers.features.planner.memory import draft_bytes, plan_memory
from tp_transformers.features.planner.report import state_lines


def config_of(name: str, heads: int, kv_heads: int, folder: Path) -> str:
    """A folder with the config of a tiny architecture, and no weights."""
    architecture = ARCHITECTURES[name]
    settings = architecture.settings(heads, kv_heads, True)
    getattr(transformers, architecture.config)(**settings, architectures=[architecture.model]).save_pretrained(folder)
    return str(folder)


def llama(folder: Path, **changes: Any) -> str:
    """A checkpoint of a tiny Llama of 9 query and 3 KV heads."""
    LlamaForCausalLM(llama_config(9, 3, **changes)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", sampled(ARCHITECTURES, 5))
def test_the_smallest_size_is_the_first_that_fits(name, tmp_path) -> None:
    found = survey(config_of(name, *ARCHITECTURES[name].variants[-1], tmp_path))
    planned = {size: plan_memory(found, size, batch=3, context=9) for size in (1, 2, 3)}
    fullest = {size: max(each.total_bytes) for size, each in planned.items()}
    for memory in fullest.values():
        first = next(size for size, held in fullest.items() if held <= memory)
        assert smallest_size(planned[2], memory) == first


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (9, 3)])
@pytest.mark.parametrize(
    "name",
    wide(
        [
            "mamba2",
            "recurrent_gemma",
            "minimax",
            "xlstm",
            "lfm2",
            "qwen3_5_text",
            "falcon_h1",
            "jamba",
            "zamba",
            "kimi_linear",
        ],
        4,
    ),
)
def test_states_are_those_that_one_process_keeps(name, heads, groups, tmp_path) -> None:
    model = MIXERS[name].make(heads, groups).float()
    model.config._experts_implementation = "eager"  # torch 2.8 has no grouped products on a CPU
    model.save_pretrained(tmp_path)
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        made = model.generate(tokens, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    with torch.no_grad():
        answer = model(tokens)  # some keep states in outputs alone
    kept = sum(state.nbytes for state in states(model, answer, made.get("past_key_values")))
    found = survey(str(tmp_path))
    for size in (1, 2 if heads == 8 else 3):  # ranks of as many heads and groups
        each = [states.nbytes for states in plan_memory(found, size, batch=2, context=7).states]
        assert [sum(ranks) for ranks in zip(*each, strict=True)] == [kept // size] * size
    uneven = plan_memory(found, 2, batch=2, context=7).cache_bytes
    assert sum(uneven) >= kept
    assert plan_memory(found, 2, batch=2).states == ()


def test_states_that_no_mixer_makes_are_not_counted(tmp_path) -> None:
    MIXERS["rwkv"].make(8, 8).save_pretrained(tmp_path)
    planned = plan_memory(survey(str(tmp_path)), 2, batch=2, context=7)
    assert {states.nbytes for states in planned.states} == {None}
    (line,) = state_lines(planned)
    assert line.endswith("not known, and not counted: the model makes them, and gives them to it")


@pytest.fixture
def llama_70b(tmp_path: Path) -> str:
    """Llama 3 70B but for its weights: its config, and 30 files that are holes after their headers."""
    config = llama_config(64, 8, vocab_size=128256, hidden_size=8192, intermediate_size=28672, head_dim=128)
    config.update({"num_hidden_layers": 80, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = {name: param.shape for name, param in LlamaForCausalLM(config).named_parameters()}
    index = {}
    for number in range(30):
        header, stop, file = {}, 0, f"model-{number + 1:05}-of-00030.safetensors"
        for name in list(shapes)[number::30]:
            start, stop = stop, stop + 2 * shapes[name].numel()
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [start, stop]}
            index[name] = file
        text = json.dumps(header).encode()
        with (tmp_path / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + stop)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return str(tmp_path)


def test_seventy_billion_parameters_are_planned_from_headers(llama_70b) -> None:
    found = survey(llama_70b)
    stock = found.stock
    assert (stock.files, stock.missing, stock.unexpected) == (30, (), ())
    assert stock.bytes_read == sum(8 + length_of(file) for file in Path(llama_70b).glob("*.safetensors"))
    assert stock.bytes_read < 1e-6 * stock.nbytes
    planned = plan_memory(found, 8, batch=8, context=8192)
    norms = 161 * 8192 * 2
    assert planned.parameter_bytes == ((stock.nbytes - norms) // 8 + norms,) * 8
    assert planned.cache_bytes == (8 * 8192 * 80 * 2 * 128 * 2,) * 8  # one KV head a rank
    assert smallest_size(planned, 24 * 10**9) == 8  # 7 ranks: two KV heads on the first


def length_of(file: Path) -> int:
    """Bytes of a header."""
    with file.open("rb") as stream:
        return int.from_bytes(stream.read(8), "little")


def test_what_is_missing_and_unexpected_is_what_a_load_reports(tmp_path) -> None:
    folder = llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert survey(folder).stock.missing == ()  # type: ignore[union-attr] # the head is tied
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors |= {"model.layers.1.mlp.rotary_emb.inv_freq": torch.zeros(4), "model.other": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    _, told = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    stock = survey(folder).stock
    assert set(stock.missing) == set(told["missing_keys"]) == {"model.layers.1.mlp.up_proj.weight"}
    assert set(stock.unexpected) == set(told["unexpected_keys"])
    assert stock.bytes_read == headers(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert survey(folder).stock.twice == (("lm_head.weight", "model.embed_tokens.weight"),)  # type: ignore[union-attr]
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.norm.weight: got \(7,\), expected \(72,\)"):
        survey(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, "auto"])
def test_dtypes_are_those_of_a_load(tmp_path, dtype) -> None:
    ARCHITECTURES["t5"].make(6, 6).save_pretrained(tmp_path)  # float16 leaves its `wo` in float32
    model = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    planned = plan_memory(survey(str(tmp_path), dtype=dtype), 1)
    assert {one.name: one.dtype for one in planned.parameters} == {n: p.dtype for n, p in model.named_parameters()}
    assert planned.parameter_bytes == (sum(param.nbytes for param in model.parameters()),)


def test_what_is_quantised_counts_as_it_is_held(tmp_path) -> None:
    llama(tmp_path / "plain", dtype="bfloat16")
    quantize_folder(tmp_path / "plain", tmp_path / "fp8", (16, 16))
    found = survey(str(tmp_path / "fp8"))
    model = load(tmp_path / "fp8", LlamaForCausalLM)
    assert plan_memory(found, 1).parameter_bytes == (sum(param.nbytes for param in model.parameters()),)
    assert (found.stock.missing, found.stock.unexpected) == ((), ())


def test_what_stays_packed_counts_as_it_is_held(tmp_path) -> None:
    llama(tmp_path / "plain", dtype="bfloat16")
    compressed(tmp_path / "plain", tmp_path / "packed", bits=8)
    planned = plan_memory(survey(str(tmp_path / "packed"), packed=True), 1)
    model = load(tmp_path / "packed", LlamaForCausalLM, tp_dequantize=False)
    assert planned.parameter_bytes == (model.tp_report.share,)
    assert planned.parameter_bytes < plan_memory(survey(str(tmp_path / "packed")), 1).parameter_bytes
    halves = plan_memory(planned.survey, 2).parameter_bytes
    assert sum(halves) < 1.5 * model.tp_report.share


def test_a_strategy_that_replicates_is_named(tmp_path) -> None:
    Qwen3Config(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2).save_pretrained(
        tmp_path
    )
    found = {each.name: each.replicated_because for each in plan_memory(survey(str(tmp_path)), 2).parameters}
    assert found["model.layers.0.self_attn.q_norm.weight"] == "the strategy is replicated_with_grad_allreduce"


def test_every_whole_parameter_has_its_reason(tmp_path) -> None:
    folder = llama(tmp_path, attention_bias=True, mlp_bias=True)

    def reasons(size: int, plan: Any = "auto") -> dict[str, str | None]:
        planned = plan_memory(survey(folder, tp_plan=plan), size)
        return {parameter.name.removeprefix("model."): parameter.replicated_because for parameter in planned.parameters}

    seen = reasons(2)
    assert seen["layers.0.self_attn.q_proj.weight"] is None
    assert seen["norm.weight"] == "the strategy is replicate"
    assert seen["layers.0.mlp.down_proj.bias"] == "rowwise does not shard a bias"
    assert reasons(10)["layers.0.self_attn.q_proj.weight"] == "there are more ranks than query heads"
    assert reasons(10)["layers.0.mlp.up_proj.weight"] is None
    mlp = {
        f"model.layers.*.mlp.{name}_proj": how
        for name, how in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))
    }
    assert reasons(2, mlp)["norm.weight"] == "no rule covers it"
    assert set(reasons(1).values()) == {"there is one rank"}
    with pytest.raises(PlanError, match=r"model\.norm"):
        reasons(2, {"model.norm": "colwize"})


def test_heads_and_ties_and_a_config_alone(tmp_path) -> None:
    llama_config(9, 3, tie_word_embeddings=True).save_pretrained(tmp_path)
    found = survey(str(tmp_path), dtype="auto")
    assert found.stock is None
    assert isinstance(found.model, LlamaForCausalLM)
    planned = plan_memory(found, 2)
    assert [heads.ranks for heads in planned.heads] == [((6, 2), (3, 1))] * 2
    (embedding,) = (one for one in planned.parameters if "lm_head.weight" in one.tied)
    assert (embedding.name, embedding.local_shape(0)) == ("model.embed_tokens.weight", (-(-VOCAB // 2), 72))
    assert planned.parameter_bytes == tuple(
        sum(torch.Size(one.local_shape(rank)).numel() * 2 for one in planned.parameters) for rank in range(2)
    )


@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="transformers drafts with MTP since 5.24")
def test_layers_that_draft_tokens_are_counted(tmp_path) -> None:
    found = survey(config_of("deepseek_v3", *ARCHITECTURES["deepseek_v3"].variants[-1], tmp_path))
    layers = modeling_layers.MtpModel(found.model, 1).layers
    numbers = sum(param.numel() for param in layers.parameters())
    for size, share in ((1, 1.0), (2, 0.6)):
        held = draft_bytes(plan_memory(found, size))
        assert held[0] / numbers / found.model.dtype.itemsize == pytest.approx(share, rel=0.1)
