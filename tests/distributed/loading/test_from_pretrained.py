"""`from_pretrained(tp_plan=...)` in all its forms, on real ranks."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    pipeline,
)

import tp_transformers
from tests.support.comparisons import equal_parameters, full_gradients, read_folder, relative, relative_errors
from tests.support.models import MASK, PROMPTS, VOCAB, load, logits_of
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide

TOLERANCE = 1e-4  # fp32 sums in another order


def logits_error(model: Any, reference_file: str) -> float:
    return relative(logits_of(model), torch.load(reference_file)["logits"])


# -- what a rank holds: what it reads is held by test_architectures.py


def share(folder: str) -> dict[str, Any]:
    model = load(folder)
    return {
        "kinds": {name: type(p).__name__ for name, p in model.named_parameters()},
        "groups": model.model.layers[0].self_attn.num_key_value_groups,
        "config": (model.config.num_attention_heads, model.config.num_key_value_heads),
        "placements": {name: str(p.placements) for name, p in model.named_parameters() if isinstance(p, DTensor)},
    }


def test_parameters_are_dtensors_exactly_where_a_placement_describes_them(pool, cases) -> None:
    even = pool.run(2, share, cases(8, 4).folder)[0]
    assert even["placements"].keys() == {name for name in even["kinds"] if "norm" not in name}
    assert even["placements"]["model.layers.0.self_attn.q_proj.weight"] == "(Shard(dim=0),)"
    assert even["placements"]["model.layers.0.self_attn.o_proj.weight"] == "(Shard(dim=1),)"
    assert even["kinds"]["model.norm.weight"] == "Parameter"
    uneven = pool.run(2, share, cases(9, 3).folder)
    plain = {name.rsplit(".", 2)[-2] for name, kind in uneven[0]["kinds"].items() if kind != "ShardDTensor"}
    norms = {"norm", "input_layernorm", "post_attention_layernorm"}
    assert plain == {"q_proj", "k_proj", "v_proj", "o_proj", *norms}
    shared = pool.run(4, share, cases(8, 2).folder)
    assert [rank["groups"] for rank in shared] == [2, 2, 2, 2]
    assert all(rank["config"] == (8, 2) for rank in shared), "the shared config stays as it is"


@on_ranks(3)
def test_casts_happen_on_the_shard(folder) -> None:
    model = load(folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert equal_parameters(model, LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))


# -- meshes


@pytest.mark.parametrize(
    ("size", "heads", "axes"), [(4, (9, 3), ("dp", "tp")), (4, (8, 1), ("dp", "tp")), (3, (8, 4), None)]
)
@on_ranks()
def test_a_mesh_with_and_without_a_data_parallel_axis(folder, axes) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2) if axes else (3,), mesh_dim_names=axes)
    size = mesh.size(mesh.ndim - 1)
    model = load(folder, device_mesh=mesh, tp_size=size)
    assert relative(logits_of(model), logits_of(LlamaForCausalLM.from_pretrained(folder))) < TOLERANCE
    assert model.tp_size == size
    assert model.tp_group.rank == dist.get_rank() % size
    dist.barrier()  # rank 0 takes the store along, which the other copy may still need


# -- ways in


def ways_in(folder: str, reference: str, plan_file: str) -> dict[str, float]:
    from tp_transformers.plans import Plan
    from tp_transformers.plans.yaml_file import available_plans

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
    model = load(None, LlamaForCausalLM, config=whole.config, state_dict=whole_state)
    errors["state_dict"] = logits_error(model, reference)
    return errors


@pytest.mark.parametrize("heads", wide([((9, 3),), ((8, 4),)], 1))
def test_every_way_in(pool, cases, tmp_path, heads) -> None:
    case = cases(*heads)
    (tmp_path / "mine.yaml").write_text("extends: llama\nheads: {lm_head: null}\n")
    for errors in pool.run(2, ways_in, case.folder, case.reference, str(tmp_path / "mine.yaml")):
        assert max(errors.values()) < TOLERANCE, errors


HEADS = [AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoModelForTokenClassification]


@pytest.mark.parametrize("auto", wide(HEADS, 1))
@on_ranks(2)
def test_every_head_class_and_gradient_checkpointing(folder, auto) -> None:
    models, grads = [], []
    for plan in ("auto", None):
        torch.manual_seed(5)
        models.append(load(folder, auto, tp_plan=plan).train())
    for model in models:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.gradient_checkpointing_enable()
        outputs = model(PROMPTS, attention_mask=MASK)
        output = outputs.start_logits if "start_logits" in outputs else outputs.logits
        output.square().sum().backward()
        grads.append(full_gradients(model))
        model.eval()
    with torch.no_grad():
        assert relative(*(model(PROMPTS, attention_mask=MASK)[0] for model in models)) < TOLERANCE
    assert max(relative_errors(*grads).values()) < TOLERANCE
    assert models[0].tp_resolution.uncovered == ()


@pytest.mark.parametrize(("heads", "size"), wide([((9, 3), 2), ((8, 1), 3)], 1))
@on_ranks()
def test_ways_to_generate(folder) -> None:
    models = load(folder), LlamaForCausalLM.from_pretrained(folder)
    for name, arguments in {
        "greedy": {},
        "beams": {"num_beams": 3},
        "static cache": {"cache_implementation": "static"},
        "no cache": {"use_cache": False},
        "sampled": {"do_sample": True},
        "scores": {"output_scores": True, "return_dict_in_generate": True},
    }.items():
        outputs = []
        for model in models:
            torch.manual_seed(11)
            output = model.generate(
                PROMPTS, attention_mask=MASK, **{"max_new_tokens": 6, "do_sample": False, **arguments}
            )
            outputs.append(getattr(output, "sequences", output))
        assert torch.equal(*outputs), name
    for implementation in ("eager", "sdpa"):
        for model in models:
            model.set_attn_implementation(implementation)
        with torch.inference_mode():
            logits = (model(PROMPTS, attention_mask=MASK).logits for model in models)
            assert relative(*logits) <= TOLERANCE, implementation


def through_pipeline(folder: str) -> tuple[Any, ...]:
    from transformers import PreTrainedTokenizerFast
    from transformers.distributed.configuration_utils import DistributedConfig

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with tp_transformers.enable():
        pipe = pipeline(
            "text-generation", model=folder, tokenizer=tokenizer, model_kwargs={"tp_plan": "auto"}, dtype="float32"
        )
        ready = load(folder)
        given = pipeline("text-generation", model=ready, tokenizer=tokenizer)
        short = pipeline("text-generation", model=folder, tokenizer=tokenizer, tp_plan="auto", tp_watch=False)
        with pytest.raises(tp_transformers.PlanError, match="pipeline: got tp_plan and a LlamaForCausalLM, which is"):
            pipeline("text-generation", model=ready, tokenizer=tokenizer, tp_plan="auto")
        with pytest.raises(tp_transformers.PlanError, match=r"^from_pretrained: got both tp_plan and device_map"):
            pipeline("text-generation", model=folder, tokenizer=tokenizer, tp_plan="auto", device_map="auto")
        with pytest.raises(tp_transformers.PlanError, match=r"^tp_plan: got \{\}"):
            pipeline("text-generation", model=folder, tokenizer=tokenizer, tp_plan={})
        if hasattr(DistributedConfig(), "pp_size"):  # of newer releases
            config = DistributedConfig(tp_size=2, pp_size=2)
            with pytest.raises(tp_transformers.UnsupportedError, match=r"^distributed_config: got pp_size=2"):
                pipeline("text-generation", model=folder, tokenizer=tokenizer, distributed_config=config)
    plain = pipeline("text-generation", model=LlamaForCausalLM.from_pretrained(folder), tokenizer=tokenizer)
    texts = [
        p("w5 w17 w98", max_new_tokens=6, do_sample=False, return_full_text=False)[0]["generated_text"]
        for p in (pipe, given, short, plain)
    ]
    return (
        *(tp_transformers.is_tensor_parallel(p.model) for p in (pipe, short)),
        texts[3] != "",
        texts == [texts[3]] * 4,
    )


@needs("clients")
def test_pipelines(pool, cases, tmp_path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "checkpoint"
    shutil.copytree(cases(8, 2).folder, folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)
    assert pool.run(2, through_pipeline, str(folder)) == [(True, True, True, True)] * 2


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
    return error < TOLERANCE and equal_parameters(duplicate, whole)


@pytest.mark.parametrize("heads", [(8, 4), (9, 3)])
def test_a_model_that_is_cast_or_copied_is_still_whole(pool, cases, tmp_path, heads) -> None:
    case = cases(*heads)
    assert pool.run(2, casts_and_copies, case.folder, str(tmp_path / "cast"), str(tmp_path / "copied")) == [True] * 2
    whole, cast, copied = (read_folder(path) for path in (case.folder, tmp_path / "cast", tmp_path / "copied"))
    assert whole.keys() == cast.keys() == copied.keys()
    for name, tensor in whole.items():
        assert torch.equal(cast[name], tensor.bfloat16())
        assert torch.equal(copied[name], tensor)


@on_ranks(2)
def test_models_load_in_inference_mode(folder) -> None:
    """Parameters that are made in inference mode are filled by threads, which begin outside it."""
    with torch.inference_mode():
        assert equal_parameters(load(folder, tp_map=False), AutoModelForCausalLM.from_pretrained(folder))
