"""`from_pretrained(tp_plan=...)` in all its forms, on real ranks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    pipeline,
)

import tp_transformers
from tests.support.models import HEAD_DIM, MASK, PROMPTS, VOCAB, bytes_read, headers, observe, read_folder, relative
from tests.support.pool import WorkerError
from tests.support.tiers import wide

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-4  # fp32 sums in another order


def load(folder: str, auto: Any = AutoModelForCausalLM, **arguments: Any) -> Any:
    with tp_transformers.enable():
        return auto.from_pretrained(folder, **{"tp_plan": "auto", **arguments})


def logits_error(model: Any, reference_file: str) -> float:
    with torch.no_grad():
        logits = model(PROMPTS, attention_mask=MASK).logits
    return relative(logits, torch.load(reference_file)["logits"])


# -- what a rank holds and reads


def share(folder: str) -> dict[str, Any]:
    model = load(folder)
    params = list(model.parameters())
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() * p.element_size() for p in params)
    return {
        "read": bytes_read(model),
        "local": local,
        "whole": sum(p.tp_shard.shape.numel() * p.element_size() for p in params),
        "kinds": {name: type(p).__name__ for name, p in model.named_parameters()},
        "groups": model.model.layers[0].self_attn.num_key_value_groups,
        "config": (model.config.num_attention_heads, model.config.num_key_value_heads),
        "placements": {name: str(p.placements) for name, p in model.named_parameters() if isinstance(p, DTensor)},
    }


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_reads_its_own_bytes_and_the_headers(pool: Any, cases: Any, size: int) -> None:
    folder = cases(9, 3).folder
    for rank in pool.run(size, share, folder):
        assert rank["read"] - headers(folder) == rank["local"]
        assert rank["local"] < rank["whole"]


def test_parameters_are_dtensors_exactly_where_a_placement_describes_them(pool: Any, cases: Any) -> None:
    even = pool.run(2, share, cases(8, 4).folder)[0]
    assert even["placements"].keys() == {name for name in even["kinds"] if "norm" not in name}
    assert even["placements"]["model.layers.0.self_attn.q_proj.weight"] == "(Shard(dim=0),)"
    assert even["placements"]["model.layers.0.self_attn.o_proj.weight"] == "(Shard(dim=1),)"
    assert even["kinds"]["model.norm.weight"] == "Parameter"
    uneven = pool.run(2, share, cases(9, 3).folder)
    plain = {name.rsplit(".", 2)[-2] for name, kind in uneven[0]["kinds"].items() if kind == "Parameter"}
    norms = {"norm", "input_layernorm", "post_attention_layernorm"}
    assert plain == {"q_proj", "k_proj", "v_proj", "o_proj", *norms}
    shared = pool.run(4, share, cases(8, 2).folder)
    assert [rank["groups"] for rank in shared] == [2, 2, 2, 2]
    assert all(rank["config"] == (8, 2) for rank in shared), "the shared config stays as it is"


def dtypes(folder: str) -> dict[str, Any]:
    model = load(folder, dtype=torch.bfloat16)
    whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    equal = [
        torch.equal(tp_transformers.full_tensor(mine), theirs)
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True)
    ]
    return {"dtype": model.dtype, "equal": all(equal)}


def test_casts_happen_on_the_shard(pool: Any, cases: Any) -> None:
    assert pool.run(3, dtypes, cases(9, 3).folder) == [{"dtype": torch.bfloat16, "equal": True}] * 3


# -- meshes


def on_mesh(folder: str, reference: str, kind: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    names = {"named": ("dp", "tp"), "1-D": None}[kind]
    shape = (dist.get_world_size(),) if kind == "1-D" else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = load(folder, device_mesh=mesh, tp_size=mesh.size(mesh.ndim - 1))
    return {"error": logits_error(model, reference), "size": model.tp_size, "rank": model.tp_group.rank}


def test_a_mesh_with_a_data_parallel_axis(pool: Any, cases: Any) -> None:
    case = cases(9, 3)
    results = pool.run(4, on_mesh, case.folder, case.reference, "named")
    assert [result["rank"] for result in results] == [0, 1, 0, 1]
    assert all(result["size"] == 2 and result["error"] < TOLERANCE for result in results)


def test_shared_kv_heads_on_a_mesh_with_a_data_parallel_axis(pool: Any, cases: Any) -> None:
    case = cases(8, 1)
    results = pool.run(4, on_mesh, case.folder, case.reference, "named")
    assert all(result["error"] < TOLERANCE for result in results)


def test_a_mesh_of_one_axis(pool: Any, cases: Any) -> None:
    case = cases(8, 4)
    assert all(r["error"] < TOLERANCE for r in pool.run(3, on_mesh, case.folder, case.reference, "1-D"))


def bad_mesh(folder: str) -> None:
    dist.init_process_group("gloo")
    load(folder, device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")))


def bad_size(folder: str) -> None:
    load(folder, tp_size=3)


# -- ways in


def ways_in(folder: str, reference: str, plan_file: str) -> dict[str, float]:
    from tp_transformers import Plan
    from tp_transformers.plans.catalogue import available_plans

    errors = {}
    for name, auto, arguments in (
        ("auto class", AutoModelForCausalLM, {}),
        ("concrete class", LlamaForCausalLM, {}),
        ("tp_size", AutoModelForCausalLM, {"tp_size": dist.get_world_size() if dist.is_initialized() else 2}),
        ("yaml", AutoModelForCausalLM, {"tp_plan": plan_file}),
        ("path", AutoModelForCausalLM, {"tp_plan": Path(plan_file)}),
        ("Plan", AutoModelForCausalLM, {"tp_plan": Plan.from_yaml(available_plans()["llama"])}),
        (
            "dict",
            AutoModelForCausalLM,
            {"tp_plan": {"model.layers.*.mlp.up_proj": "colwise_rep", "lm_head": "colwise_rep"}},
        ),
    ):
        errors[name] = logits_error(load(folder, auto, **arguments), reference)
    base = load(folder, AutoModel)
    with torch.no_grad():
        hidden = base(PROMPTS, attention_mask=MASK).last_hidden_state
        whole = LlamaForCausalLM.from_pretrained(folder)
        errors["base model"] = relative(hidden, whole.model(PROMPTS, attention_mask=MASK).last_hidden_state)
    assert base.tp_plan["embed_tokens"] == "embedding_rowwise"
    model, info = load(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    errors["loading info"] = logits_error(model, reference)
    # Trained and inferred in any class: the state dict given by the caller.
    whole_state = whole.state_dict()
    with tp_transformers.enable():
        model = LlamaForCausalLM.from_pretrained(None, config=whole.config, state_dict=whole_state, tp_plan="auto")
    errors["state_dict"] = logits_error(model, reference)
    return errors


@pytest.mark.parametrize("heads", [(8, 4), (9, 3)])
def test_every_way_in(pool: Any, cases: Any, tmp_path: Path, heads: tuple[int, int]) -> None:
    case = cases(*heads)
    (tmp_path / "mine.yaml").write_text("extends: llama\nheads: {lm_head: null}\n")
    for errors in pool.run(2, ways_in, case.folder, case.reference, str(tmp_path / "mine.yaml")):
        assert max(errors.values()) < TOLERANCE, errors


def head_class(folder: str, auto: Any) -> dict[str, Any]:
    models = []
    for plan in ("auto", None):
        torch.manual_seed(5)
        models.append(load(folder, auto, tp_plan=plan).train())
    grads = []
    for model in models:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.gradient_checkpointing_enable()
        outputs = model(PROMPTS, attention_mask=MASK)
        output = outputs.start_logits if "start_logits" in outputs else outputs.logits
        output.square().sum().backward()
        grads.append({name: tp_transformers.full_tensor(p, p.grad) for name, p in model.named_parameters()})
        model.eval()
    with torch.no_grad():
        ours, theirs = (model(PROMPTS, attention_mask=MASK)[0] for model in models)
    return {
        "output": relative(ours, theirs),
        "grads": max(relative(grads[0][name], grad) for name, grad in grads[1].items()),
        "uncovered": models[0].tp_resolution.uncovered,
    }


@pytest.mark.parametrize(
    "auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering]
)
def test_every_head_class_and_gradient_checkpointing(pool: Any, cases: Any, auto: Any) -> None:
    for result in pool.run(2, head_class, cases(9, 3).folder, auto):
        assert result["output"] < TOLERANCE
        assert result["grads"] < TOLERANCE
        assert result["uncovered"] == ()


def ways_to_generate(folder: str) -> list[str]:
    """The ways in which tensor-parallel generation differs from one process."""
    ours, theirs = load(folder), LlamaForCausalLM.from_pretrained(folder)
    different = []
    for name, arguments in {
        "greedy": {},
        "beams": {"num_beams": 3},
        "static cache": {"cache_implementation": "static"},
        "no cache": {"use_cache": False},
        "sampled": {"do_sample": True},
        "scores": {"output_scores": True, "return_dict_in_generate": True},
    }.items():
        outputs = []
        for model in (ours, theirs):
            torch.manual_seed(11)
            output = model.generate(
                PROMPTS, attention_mask=MASK, **{"max_new_tokens": 6, "do_sample": False, **arguments}
            )
            outputs.append(getattr(output, "sequences", output))
        if not torch.equal(*outputs):
            different.append(name)
    for implementation in ("eager", "sdpa"):
        for model in (ours, theirs):
            model.set_attn_implementation(implementation)
        with torch.inference_mode():
            error = relative(*(model(PROMPTS, attention_mask=MASK).logits for model in (ours, theirs)))
        if error > TOLERANCE:
            different.append(implementation)
    return different


@pytest.mark.parametrize(("heads", "size"), [((9, 3), 2), ((8, 1), 3)])
def test_ways_to_generate(pool: Any, cases: Any, heads: tuple[int, int], size: int) -> None:
    assert pool.run(size, ways_to_generate, cases(*heads).folder) == [[]] * size


def through_pipeline(folder: str) -> tuple[bool, Any, Any]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with tp_transformers.enable():
        pipe = pipeline(
            "text-generation", model=folder, tokenizer=tokenizer, model_kwargs={"tp_plan": "auto"}, dtype="float32"
        )
        ready = load(folder)
        given = pipeline("text-generation", model=ready, tokenizer=tokenizer)
    plain = pipeline("text-generation", model=LlamaForCausalLM.from_pretrained(folder), tokenizer=tokenizer)
    texts = [
        p("w5 w17 w98", max_new_tokens=6, do_sample=False, return_full_text=False)[0]["generated_text"]
        for p in (pipe, given, plain)
    ]
    return tp_transformers.is_tensor_parallel(pipe.model), texts[0] == texts[2] != "", texts[1] == texts[2]


def test_pipelines(pool: Any, cases: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "checkpoint"
    shutil.copytree(cases(8, 2).folder, folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)
    assert pool.run(2, through_pipeline, str(folder)) == [(True, True, True)] * 2


# -- checkpoints that do not match the model one to one


def missing_head(folder: str) -> dict[str, Any]:
    # Ranks seed differently on purpose: rank 0's draw is what counts.
    torch.manual_seed(5 + int(os.environ["RANK"]))
    model, info = load(folder, AutoModelForSequenceClassification, output_loading_info=True, num_labels=5)
    torch.manual_seed(5)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5)
    return {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "equal": torch.equal(tp_transformers.full_tensor(model.score.weight), plain.score.weight),
        "kind": type(model.score.weight).__name__,
    }


def test_missing_weights_are_initialised_as_one_process_would(pool: Any, cases: Any) -> None:
    for result in pool.run(2, missing_head, cases(8, 4).folder):
        assert result["missing"] == ["score.weight"]
        assert result["unexpected"] == ["lm_head.weight"]
        assert result["equal"]
        assert result["kind"] == "Parameter"  # held whole on every rank


def edited(folder: str, target: Path, change: Any) -> str:
    """A copy of a checkpoint in one file, with its tensors changed."""
    shutil.copytree(folder, target)
    tensors = {}
    for file in target.glob("*.safetensors"):
        tensors.update(load_file(file))
        file.unlink()
    (target / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def missing_sharded(folder: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model, info = load(folder, output_loading_info=True)
    torch.manual_seed(3)
    plain = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        error = relative(model(PROMPTS).logits, plain(PROMPTS).logits)
    return {
        "missing": sorted(info["missing_keys"]),
        "equal": all(
            torch.equal(tp_transformers.full_tensor(mine), theirs)
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True)
        ),
        "error": error,
    }


def test_missing_sharded_weights_too(pool: Any, cases: Any, tmp_path: Path) -> None:
    names = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"]
    folder = edited(cases(9, 3).folder, tmp_path / "c", lambda tensors: [tensors.pop(name) for name in names])
    for result in pool.run(3, missing_sharded, folder):
        assert result["missing"] == names
        assert result["equal"]
        assert result["error"] < TOLERANCE


def tied(folder: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model, info = load(folder, output_loading_info=True)
    torch.manual_seed(3)
    plain, plain_info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        error = relative(model(PROMPTS).logits, plain(PROMPTS).logits)
    params = list(model.parameters())
    return {
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "plain tied": plain.lm_head.weight is plain.model.embed_tokens.weight,
        "missing": sorted(info["missing_keys"]) == sorted(plain_info["missing_keys"]),
        "error": error,
        "read": bytes_read(model),
        "local": sum((p.to_local() if isinstance(p, DTensor) else p).numel() * 4 for p in params),
    }


@pytest.mark.parametrize("kind", ["source only", "target only", "both equal", "both different", "neither"])
def test_tied_embeddings(pool: Any, cases: Any, tmp_path: Path, kind: str) -> None:
    embed, head = "model.embed_tokens.weight", "lm_head.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if kind not in ("source only", "neither"):
            tensors[head] = tensors[embed].clone()
        if kind in ("target only", "neither"):
            del tensors[embed]
        if kind == "both different":
            tensors[head][-1] += 1  # a row that only the last rank holds

    folder = edited(cases(8, 2, tie_word_embeddings=True).folder, tmp_path / "c", change)
    for result in pool.run(3, tied, folder):
        assert result["tied"] == result["plain tied"] == (kind != "both different")
        assert result["missing"]
        assert result["error"] < TOLERANCE
        if kind in ("source only", "target only"):
            assert result["read"] - headers(folder) == result["local"], "a tied weight is read once"


def mismatched(folder: str) -> dict[str, Any]:
    model, info = load(folder, ignore_mismatched_sizes=True, output_loading_info=True)
    return {
        "mismatched": [(name, tuple(got), tuple(want)) for name, got, want in info["mismatched_keys"]],
        "shape": tuple(tp_transformers.full_tensor(model.lm_head.weight).shape),
        "finite": bool(torch.isfinite(model(PROMPTS).logits).all()),
    }


def shrink_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:10].clone()


def test_mismatched_sizes_can_be_ignored(pool: Any, cases: Any, tmp_path: Path) -> None:
    folder = edited(cases(8, 4).folder, tmp_path / "c", shrink_head)
    for result in pool.run(2, mismatched, folder):
        assert result["mismatched"] == [("lm_head.weight", (10, 64), (VOCAB, 64))]
        assert result["shape"] == (VOCAB, 64)
        assert result["finite"]


# -- architectures without a plan of ours


def tiny(config_class: Any, **changes: Any) -> Any:
    return config_class(
        vocab_size=VOCAB,
        hidden_size=8 * HEAD_DIM,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        pad_token_id=0,
        eos_token_id=None,
        initializer_range=0.2,
        **changes,
    )


def declared(folder: str, reference: str) -> dict[str, Any]:
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tp_transformers").addHandler(handler)
    from tp_transformers.loading import from_pretrained as pretrained

    pretrained._told.clear()  # a warm worker may have told already
    for _ in range(2):
        model = load(folder)
    seen, expected = observe(model), torch.load(reference)
    return {
        "logits": relative(seen["logits"], expected["logits"]),
        "tokens": torch.equal(seen["tokens"], expected["tokens"]),
        "grads": max(
            relative(tp_transformers.full_tensor(param, param.grad), expected["grads"][name])
            for name, param in model.named_parameters()
        ),
        "told": sum("ForCausalLM declares" in record for record in records),
    }


DECLARED: dict[str, dict[str, Any]] = {
    "Helium": {},
    "Exaone4": {},  # norms within heads, which its plan names
    "Apertus": {},  # numbers to learn between the linears of an MLP
    "Beam": {"layer_types": ["full_attention"] * 2},  # a gate and its bias for every head
}
"""Architectures without a plan of ours, and what their configs need."""


@pytest.mark.parametrize("size", wide([3, 2, 4], 1))
@pytest.mark.parametrize("name", DECLARED)
def test_the_plan_that_transformers_declares_at_any_size(pool: Any, tmp_path: Path, name: str, size: int) -> None:
    config, model = getattr(transformers, f"{name}Config", None), getattr(transformers, f"{name}ForCausalLM", None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    model(tiny(config, tie_word_embeddings=True, **DECLARED[name])).save_pretrained(tmp_path / "c")
    torch.save(observe(model.from_pretrained(tmp_path / "c")), tmp_path / "reference.pt")
    results = pool.run(size, declared, str(tmp_path / "c"), str(tmp_path / "reference.pt"))
    for result in results:
        assert result["logits"] < TOLERANCE
        assert result["tokens"]
        assert result["grads"] < TOLERANCE
    assert [result["told"] for result in results] == [1, *[0] * (len(results) - 1)]


def converted(folder: str) -> dict[str, Any]:
    plan = {"model.layers.*.self_attn.q_proj": "colwise_rep", "lm_head": "colwise_rep"}
    model = load(folder, tp_plan=plan)
    whole = MixtralForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        error = relative(model(PROMPTS).logits, whole(PROMPTS).logits)
    equal = all(
        torch.equal(tp_transformers.full_tensor(mine), theirs)
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True)
    )
    return {"error": error, "equal": equal}


def test_converted_checkpoints_load_and_save(pool: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny(MixtralConfig, num_local_experts=3, num_experts_per_tok=2)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "first")
    MixtralForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "c", max_shard_size="100KB")
    with open(tmp_path / "c" / "model.safetensors.index.json") as file:
        assert any("experts.0" in name for name in json.load(file)["weight_map"]), "experts are stored one by one"
    for result in pool.run(2, converted, str(tmp_path / "c")):
        assert result["equal"]
        assert result["error"] < TOLERANCE
    pool.run(2, save_converted, str(tmp_path / "c"), str(tmp_path / "saved"))
    before, after = read_folder(tmp_path / "c"), read_folder(tmp_path / "saved")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


TRANSPOSED = {
    "model.language_model.layers.*.mlp.experts": "moe_tp_experts",
    "model.language_model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.language_model.layers.*.mlp.experts.down_proj": "rowwise",
}


def save_transposed(folder: str, target: str) -> float:
    with tp_transformers.enable():
        model = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, tp_plan=TRANSPOSED)
    model.save_pretrained(target)
    return bytes_read(model)


def test_converters_that_measure_parameters_see_them_whole(pool: Any, tmp_path: Path) -> None:
    # Experts of 24 features in blocks of 8 are cut 16 and 8: plain tensors, whose local shape is not the whole one.
    torch.manual_seed(0)
    config = Qwen3VLMoeConfig(
        text_config=tiny(dict, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    )
    Qwen3VLMoeForConditionalGeneration(config).save_pretrained(tmp_path / "first")
    Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "c")
    read = pool.run(2, save_transposed, str(tmp_path / "c"), str(tmp_path / "saved"))
    before, after = read_folder(tmp_path / "c"), read_folder(tmp_path / "saved")
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert read[1] < read[0] < sum(tensor.nbytes for tensor in before.values())


def save_converted(folder: str, target: str) -> None:
    load(folder, tp_plan={"lm_head": "colwise_rep"}).save_pretrained(target, max_shard_size="100KB")


# -- bad input: one clear error on all ranks


def test_bad_meshes_and_sizes(pool: Any, cases: Any) -> None:
    folder = cases(8, 4).folder
    for size, function, says in (
        (4, bad_mesh, "MeshError: device_mesh: got 2 axes named ('dp', 'pp')"),
        (2, bad_size, "MeshError: tp_size: got 3, expected 2"),
    ):
        with pytest.raises(WorkerError) as caught:
            pool.run(size, function, folder)
        assert len(caught.value.errors) == size
        (error,) = set(caught.value.errors.values())
        assert error.startswith(says)


def damage_missing(folder: Path) -> None:
    (folder / "model-00002-of-00007.safetensors").unlink()


def damage_truncated(folder: Path) -> None:
    path = folder / "model-00002-of-00007.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_header(folder: Path) -> None:
    path = folder / "model-00002-of-00007.safetensors"
    data = bytearray(path.read_bytes())
    data[8:20] = b"not json....."[:12]
    path.write_bytes(bytes(data))


def damage_outside(folder: Path) -> None:
    path = folder / "model-00002-of-00007.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name]["data_offsets"] = [end + 10**9 for end in header[name]["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def damage_index_escapes(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shutil.copy(folder / "model-00002-of-00007.safetensors", folder.parent / "stolen.safetensors")
    for name, file in index["weight_map"].items():
        if file.startswith("model-00002"):
            index["weight_map"][name] = "../stolen.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damage_index_lies(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"]["model.layers.7.ghost.weight"] = index["weight_map"][name]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damage_pickled(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    for path in folder.glob("model*"):
        path.unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def damage_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 1
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_missing, "model-00002-of-00007.safetensors: got no such file"),
        (damage_truncated, "truncated"),
        (damage_header, "not JSON"),
        (damage_outside, "inside the file"),
        (damage_index_escapes, "own folder"),
        (damage_index_lies, "model.layers.7.ghost.weight: got it in none of the files"),
        (damage_pickled, "save_pretrained"),
        (damage_shape, "got (100, 64), expected (101, 64)"),
    ],
)
def test_damaged_checkpoints(pool: Any, cases: Any, tmp_path: Path, damage: Any, says: str) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(cases(8, 4).folder, folder)
    damage(folder)
    with pytest.raises(WorkerError) as caught:
        pool.run(2, load, str(folder))
    errors = set(caught.value.errors.values())
    assert len(caught.value.errors) == 2
    assert len(errors) == 1, errors
    (error,) = errors
    assert error.startswith("CheckpointError: ")
    assert says in error


def load_with_wrong_rules(folder: str, rules: dict[str, str]) -> None:
    model = load(folder, tp_plan={f"model.layers.*.{name}": strategy for name, strategy in rules.items()})
    model(PROMPTS)


def test_rules_that_do_not_fit_together_are_told_before_the_read(pool: Any, cases: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(cases(8, 4).folder, folder)
    for file in folder.glob("*.safetensors"):  # whoever reads a weight fails
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - 8)
    rules = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise_rep"}
    with pytest.raises(WorkerError) as caught:
        pool.run(2, load_with_wrong_rules, str(folder), rules, timeout=60)
    assert set(caught.value.errors) == {0, 1}
    for error in caught.value.errors.values():
        assert "model.layers.*.mlp.gate_proj: it leaves its features sharded, but model.layers.*.mlp.down_proj" in error


def test_what_does_not_fit_in_the_forward_is_told_there(pool: Any, cases: Any) -> None:
    # That an attention's output feeds the next block is not seen in a plan.
    with pytest.raises(WorkerError) as caught:
        pool.run(2, feed_a_shard, cases(8, 4).folder, timeout=60)
    for error in caught.value.errors.values():
        assert error.startswith("PlanError: model.layers.0.mlp.down_proj: got an input of 50 features, expected 100")


def feed_a_shard(folder: str) -> None:
    model = load(folder, tp_plan={"model.layers.*.mlp.down_proj": "rowwise_rep"})
    model.model.layers[0].mlp.down_proj(torch.ones(1, 50))


def load_only_a_head(folder: str, **options: Any) -> int:
    plan = dataclasses.replace(tp_transformers.Plan.from_dict({"lm_head": "colwise_rep"}, source="it"), declared=True)
    return len(tp_transformers.local_tensor(load(folder, tp_plan=plan, **options).lm_head.weight))


def test_a_declared_plan_that_leaves_every_layer_whole_is_accepted_only_if_allowed(pool: Any, cases: Any) -> None:
    folder = cases(8, 4).folder
    with pytest.raises(WorkerError) as caught:
        pool.run(2, load_only_a_head, folder)
    for error in caught.value.errors.values():
        assert error.startswith(
            "PlanError: it: got no rule that cuts a matrix of model.layers.*, so that each of 2 ranks"
        )
    assert pool.run(2, functools.partial(load_only_a_head, allow_replicated=True), folder) == [100, 99]


def look_up_nobodys_id(folder: str) -> None:
    load(folder)(torch.tensor([[3, VOCAB]]))


def test_ids_outside_the_vocabulary_fail_as_in_one_process(pool: Any, cases: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(2, look_up_nobodys_id, cases(8, 4).folder, timeout=60)
    assert all(error.startswith("IndexError: index out of range") for error in caught.value.errors.values())
    assert len(caught.value.errors) == 2


def casts_and_copies(folder: str, cast: str, copied: str) -> bool:
    model = load(folder)
    copy.deepcopy(model.to(torch.bfloat16)).save_pretrained(cast)
    model = load(folder)
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    duplicate.save_pretrained(copied)
    whole = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        error = relative(duplicate(PROMPTS).logits, whole(PROMPTS).logits)
    return error < TOLERANCE and all(
        torch.equal(tp_transformers.full_tensor(mine), theirs)
        for mine, theirs in zip(duplicate.parameters(), whole.parameters(), strict=True)
    )


@pytest.mark.parametrize("heads", [(8, 4), (9, 3)])
def test_a_model_that_is_cast_or_copied_is_still_whole(pool: Any, cases: Any, tmp_path: Path, heads: Any) -> None:
    case = cases(*heads)
    assert pool.run(2, casts_and_copies, case.folder, str(tmp_path / "cast"), str(tmp_path / "copied")) == [True] * 2
    whole, cast, copied = (read_folder(path) for path in (case.folder, tmp_path / "cast", tmp_path / "copied"))
    assert whole.keys() == cast.keys() == copied.keys()
    for name, tensor in whole.items():
        assert torch.equal(cast[name], tensor.bfloat16())
        assert torch.equal(copied[name], tensor)


def load_differently(folders: list[str], what: str) -> None:
    rank = int(os.environ["RANK"])
    arguments: dict[str, Any] = {}
    if what == "size" and rank:
        arguments = {"tp_size": 3}
    if what == "device_map" and rank:
        arguments = {"device_map": "auto"}
    if what == "plan" and rank:
        arguments = {"tp_plan": {"model.layers.*.mlp.up_proj": "colwise_rep"}}
    load(folders[rank if what == "weights" else 0], **arguments)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("size", "MeshError: rank 1: tp_size: got 3, expected 2"),
        ("device_map", "PlanError: rank 1: from_pretrained: got both tp_plan and device_map"),
        ("plan", "MeshError: the plan: got one on rank 0 and another on rank 1"),
        ("weights", "CheckpointError: the checkpoint: got another list of files on rank 1 than on rank 0"),
    ],
)
def test_ranks_that_ask_for_different_things_all_stop(
    pool: Any, cases: Any, tmp_path: Path, what: str, says: str
) -> None:
    folder = cases(8, 4).folder
    other = edited(folder, tmp_path / "c", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WorkerError) as caught:
        pool.run(2, load_differently, [folder, other], what, timeout=60)
    assert len(caught.value.errors) == 2
    assert all(error.startswith(says) for error in caught.value.errors.values()), caught.value.errors


def load_own(folders: list[str]) -> None:
    load(folders[int(os.environ["RANK"])])


def test_a_fault_on_one_rank_stops_all_with_its_error(pool: Any, cases: Any, tmp_path: Path) -> None:
    good = cases(8, 4).folder
    bad = tmp_path / "checkpoint"
    shutil.copytree(good, bad)
    damage_truncated(bad)
    with pytest.raises(WorkerError) as caught:
        pool.run(3, load_own, [good, str(bad), good], timeout=60)
    errors = caught.value.errors
    assert len(errors) == 3
    assert len(set(errors.values())) == 1
    assert errors[0].startswith("CheckpointError: rank 1: ")
    assert "truncated" in errors[0]


def load_with_own_plan(folder: str) -> None:
    load(folder, tp_plan={"model.nope": "colwise"} if os.environ["RANK"] == "1" else "auto")


def test_a_plan_that_does_not_fit_on_one_rank_stops_all(pool: Any, cases: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(4, load_with_own_plan, cases(8, 1).folder, timeout=60)
    assert len(caught.value.errors) == 4
    assert all(error.startswith("PlanError: rank 1: plan tp_plan") for error in caught.value.errors.values())


def test_a_fault_in_transformers_on_one_rank_stops_all(pool: Any, cases: Any, tmp_path: Path) -> None:
    good = cases(8, 4).folder
    with pytest.raises(WorkerError) as caught:
        pool.run(3, load_own, [good, str(tmp_path), good], timeout=60)
    assert len(caught.value.errors) == 3
    assert all(error.startswith("RemoteRankError: rank 1: ") for error in caught.value.errors.values())
