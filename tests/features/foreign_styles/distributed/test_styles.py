"""Torch's own styles: in plans, and by `parallelize_module` on parts of a model, beside our strategies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaForCausalLM

import tp_transformers
from tests.support.comparisons import (
    assert_same_files,
    compare_seen,
    equal_parameters,
    full_gradients,
    parameter_differences,
    relative,
    relative_errors,
)
from tests.support.models import MASK, PROMPTS, VOCAB, excess_read, held, load, logits_of, make_case, observe
from tests.support.tiers import wide
from tp_transformers.strategies import STRATEGIES

TOLERANCE = 1e-4  # fp32 sums in another order
ATTENTION, MLP = "model.layers.*.self_attn", "model.layers.*.mlp"
KEPT = {"use_local_output": False}

attention = {f"{ATTENTION}.{name}_proj": ColwiseParallel() for name in "qkv"} | {
    f"{ATTENTION}.o_proj": RowwiseParallel()
}
ends = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def mlp(**options: Any) -> dict[str, Any]:
    colwise = ColwiseParallel(**options)  # one object for all modules
    return {f"{MLP}.gate_proj": colwise, f"{MLP}.up_proj": colwise, f"{MLP}.down_proj": RowwiseParallel()}


sequence = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **KEPT),
    "model.layers.*.input_layernorm": SequenceParallel(),
    "model.layers.*.post_attention_layernorm": SequenceParallel(),
    "model.norm": SequenceParallel(),
    ATTENTION: PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
        use_local_output=True,
    ),
    **attention,
    f"{ATTENTION}.o_proj": RowwiseParallel(output_layouts=Shard(1), **KEPT),
    MLP: PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **mlp(**KEPT),
    f"{MLP}.down_proj": RowwiseParallel(output_layouts=Shard(1), **KEPT),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
"""As in torch's tutorial; DTensors between the modules, so that the model counts positions in the whole sequence."""

ours_in_attention = {f"{ATTENTION}.{name}_proj": "colwise" for name in "qkv"} | {f"{ATTENTION}.o_proj": "rowwise"}

PLANS: dict[str, dict[str, Any]] = {
    "styles": {**ends, **attention, **mlp()},
    "styles that keep DTensors": {**ends, **attention, **mlp(**KEPT)},
    "styles along the sequence": sequence,
    "strategies and styles": {
        **ours_in_attention,
        **mlp(**KEPT),
        f"{MLP}.down_proj": tp_transformers.strategies.RowwiseParallel(),
        "model.embed_tokens": "embedding_rowwise",
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        "model.norm": "replicate",
    },
}


def compare_and_clip(model: Any, reference_file: str) -> dict[str, Any]:
    """Differences of logits, tokens, gradients and their norm from one process, and of gradients that no clip cuts."""
    seen, reference = observe(model), torch.load(reference_file)
    found, grads = compare_seen(model, seen, reference), full_gradients(model)
    norm = tp_transformers.clip_grad_norm_(model, 1e9)
    expected = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in reference["grads"].values()]))
    return {
        "logits": found["logits"],
        "tokens": float(not found["tokens"]),
        "grads": found["grads"][1],
        "clipped": max(relative_errors(full_gradients(model), grads).values()),
        "norm": relative(norm, expected),
    }


def in_plan(folder: str, reference: str, name: str, saved: str) -> dict[str, Any]:
    model = load(folder, tp_plan=PLANS[name])
    model.save_pretrained(saved, max_shard_size="60KB")
    copied = copy.deepcopy(model)
    errors = compare_and_clip(model, reference)
    again = relative(logits_of(copied), torch.load(reference)["logits"])
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    whole = LlamaForCausalLM.from_pretrained(folder)
    model.load_state_dict(whole.state_dict())
    loaded = equal_parameters(model, whole)
    down, head = model.model.layers[0].mlp.down_proj.weight, model.lm_head.weight
    copied.resize_token_embeddings(VOCAB + 4)
    longer = logits_of(copied)
    assert longer.shape[-1] == VOCAB + 4
    errors["resized"] = relative(longer[..., :VOCAB], torch.load(reference)["logits"])
    return {
        "errors": {**errors, "copied": again, "loaded": float(not loaded)},
        "read": excess_read(model, folder),
        "cuts": [(str(w.placements), w.to_local().shape) for w in (down, head) if isinstance(w, DTensor)],
        "name": model.tp_plan["lm_head"],
    }


@pytest.mark.parametrize(
    ("size", "heads", "name", "cuts"),
    wide(
        [
            (3, (6, 3), "styles along the sequence", [34, 67]),
            (3, (9, 1), "strategies and styles", [67]),
            (2, (8, 4), "styles", [50, 100]),
            (3, (6, 3), "styles that keep DTensors", [34, 67]),
            (2, (8, 4), "styles along the sequence", [50, 100]),
        ],
        2,
    ),
)
def test_styles_in_plans(pool, cases, tmp_path, size, heads, name, cuts) -> None:
    case = cases(*heads)
    ranks = pool.run(size, in_plan, case.folder, case.reference, name, str(tmp_path / "saved"))
    for rank in ranks:
        assert max(rank["errors"].values()) < TOLERANCE, rank["errors"]
        assert rank["read"] == 0  # of what a rank holds, and nothing else
    placements = ["(Shard(dim=1),)", "(Shard(dim=0),)"][-len(cuts) :]
    assert [placement for placement, _ in ranks[0]["cuts"]][-len(cuts) :] == placements
    assert [shape[int("1" in placement)] for placement, shape in ranks[0]["cuts"]][-len(cuts) :] == cuts
    assert ranks[0]["name"].startswith("torch.ColwiseParallel(")
    assert_same_files(case.folder, str(tmp_path / "saved"))


def ours(style: Any) -> Any:
    """The strategy of this package with the name and the arguments of a style; other styles stay."""
    cls = getattr(tp_transformers.strategies, type(style).__name__, None)
    names = {"input_layouts", "output_layouts", "use_local_output"}
    return style if cls is None else cls(**{name: value for name, value in vars(style).items() if name in names})


def by_our_names(folder: str, reference: str) -> dict[str, float]:
    plain = ColwiseParallel()  # features of uneven shards are no DTensors
    styles = {**sequence, f"{MLP}.gate_proj": plain, f"{MLP}.up_proj": plain}
    model = load(folder, tp_plan={name: ours(style) for name, style in styles.items()})
    assert model.tp_plan["lm_head"].startswith("ColwiseParallel(")
    return compare_and_clip(model, reference)


@pytest.mark.parametrize("size", wide([3, 2], 1))
def test_strategies_take_the_layouts_of_styles(pool, cases, size) -> None:
    """Of torch's tutorial of sequence parallelism; heads and features do not divide by three ranks."""
    case = cases(8, 4)
    for errors in pool.run(size, by_our_names, case.folder, case.reference):
        assert max(errors.values()) < TOLERANCE, errors


# -- parallelize_module on parts


def on_parts_of_ours(folder: str, reference: str, saved: str) -> dict[str, Any]:
    """Ours cuts attention, by heads that do not divide; torch's styles the MLPs, a strategy of ours the head."""
    model = load(folder, tp_plan=ours_in_attention)
    mesh = model.tp_group.device_mesh
    parallelize_module(model, mesh, mlp(**KEPT))
    parallelize_module(model, mesh, {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    parallelize_module(model, mesh, {"lm_head": tp_transformers.strategies.ColwiseParallel(output_layouts=Replicate())})
    model.save_pretrained(saved, max_shard_size="60KB")
    tp_transformers.save_sharded(model, f"{saved}-sharded")
    count = model.num_parameters()
    copied = copy.deepcopy(model)
    errors = compare_and_clip(model, reference)
    errors["copied"] = relative(copied(PROMPTS, attention_mask=MASK).logits, torch.load(reference)["logits"])
    whole = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(whole.state_dict())
    loaded = load(f"{saved}-sharded")
    errors["loaded"] = max(error for each in (model, loaded) for error in parameter_differences(each, whole).values())
    return {"errors": errors, "count": count == whole.num_parameters(), "held": held(model)}


def test_torch_parallelizes_parts_of_ours(pool, cases, tmp_path) -> None:
    case = cases(9, 3)
    for rank in pool.run(2, on_parts_of_ours, case.folder, case.reference, str(tmp_path / "saved")):
        assert max(rank["errors"].values()) < TOLERANCE, rank["errors"]
        assert rank["count"]
        assert rank["held"] < 0.7 * sum(file.stat().st_size for file in Path(case.folder).glob("*.safetensors"))
    assert_same_files(case.folder, str(tmp_path / "saved"))


def on_parts_of_torch(folder: str, reference: str) -> dict[str, float]:
    """A model of one process, whose attention torch cuts, and whose MLPs strategies of ours."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = LlamaForCausalLM.from_pretrained(folder)
    if dist.get_rank():  # rank 0's values count
        with torch.no_grad():
            model.model.layers[0].mlp.gate_proj.weight.zero_()
    parallelize_module(model, mesh, attention | ends)
    ours = {f"{MLP}.{name}_proj": tp_transformers.strategies.ColwiseParallel() for name in ("gate", "up")}
    parallelize_module(model, mesh, {**ours, f"{MLP}.down_proj": tp_transformers.strategies.RowwiseParallel()})
    refused: list[str] = []
    for part, strategy in ((model.model.norm, ours[f"{MLP}.up_proj"]), (model.lm_head, ours[f"{MLP}.up_proj"])):
        with pytest.raises(tp_transformers.PlanError) as caught:
            parallelize_module(part, mesh, strategy)
        refused.append(str(caught.value))
    assert "LlamaRMSNorm" in refused[0], refused
    assert "parallel already" in refused[1], refused
    return compare_and_clip(model, reference)


def test_ours_parallelizes_parts_of_torch(pool, cases) -> None:
    case = cases(6, 3)
    for errors in pool.run(3, on_parts_of_torch, case.folder, case.reference):
        assert max(errors.values()) < TOLERANCE, errors


def on_tied_modules(folder: str, reference: str) -> dict[str, Any]:
    """The head and the embedding that it is tied to, both by strategies of ours, and by ones that differ."""
    model = load(folder, tp_plan=ours_in_attention)
    mesh = model.tp_group.device_mesh
    with pytest.raises(tp_transformers.PlanError, match="is tied to one that is sharded otherwise"):
        parallelize_module(
            load(folder, tp_plan=ours_in_attention),
            mesh,
            {"lm_head": STRATEGIES["colwise_rep"], "model.embed_tokens": STRATEGIES["embedding_colwise"]},
        )
    parallelize_module(
        model, mesh, {"lm_head": STRATEGIES["colwise_rep"], "model.embed_tokens": STRATEGIES["embedding_rowwise"]}
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return compare_and_clip(model, reference)


def test_tied_modules_stay_tied(pool, tmp_path) -> None:
    case = make_case(tmp_path, 9, 3, tie_word_embeddings=True)
    for errors in pool.run(2, on_tied_modules, case.folder, case.reference):
        assert max(errors.values()) < TOLERANCE, errors


def with_copies(folder: str, reference: str, mode: str, saved: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = load(folder, tp_plan={**attention, **ends, "model.norm": "replicate"}, device_mesh=mesh)
    parallelize_module(model, mesh["tp"], mlp())
    tp_transformers.data_parallel(model, mesh, mode=mode)
    errors = compare_and_clip(model, reference)
    model.save_pretrained(saved, max_shard_size="60KB")
    return errors


@pytest.mark.parametrize("mode", wide(["shard", "replicate"], 1))
def test_styles_with_copies_of_the_model(pool, cases, tmp_path, mode) -> None:
    case = cases(8, 4)
    for errors in pool.run(4, with_copies, case.folder, case.reference, mode, str(tmp_path / "saved")):
        assert max(errors.values()) < TOLERANCE, errors
    assert_same_files(case.folder, str(tmp_path / "saved"))
