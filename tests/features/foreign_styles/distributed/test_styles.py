"""Torch's own styles: in plans, and by `parallelize_module` on parts of a model, beside our strategies."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
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
    assert_as_one_process,
    assert_same_files,
    compare_seen,
    equal_parameters,
    full_gradients,
    relative,
    relative_errors,
    worst,
)
from tests.support.models import VOCAB, excess_read, held, load, logits_of, observe
from tests.support.on_ranks import on_ranks
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


def check(model: Any, folder: str) -> None:
    """Compare logits, tokens, gradients and their norm with one process, and gradients that no clip cuts with those."""
    seen, reference = observe(model), observe(LlamaForCausalLM.from_pretrained(folder))
    assert_as_one_process(compare_seen(model, seen, reference), TOLERANCE, TOLERANCE)
    grads, norm = full_gradients(model), tp_transformers.clip_grad_norm_(model, 1e9)
    expected = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in reference["grads"].values()]))
    assert relative(norm, expected) < TOLERANCE
    assert worst(relative_errors(full_gradients(model), grads))[1] < TOLERANCE


def check_state(model: Any, folder: str, saved: Path) -> Any:
    """Compare the model, files, a copy, and a state that is loaded, with those of one process; returns the copy."""
    model.save_pretrained(saved, max_shard_size="60KB")
    copied, whole = copy.deepcopy(model), LlamaForCausalLM.from_pretrained(folder)
    check(model, folder)
    assert relative(logits_of(copied), logits_of(whole)) < TOLERANCE
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(whole.state_dict())
    assert equal_parameters(model, whole)
    dist.barrier()
    assert_same_files(folder, saved)
    return copied


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
@on_ranks()
def test_styles_in_plans(folder, tmp_path, name, cuts) -> None:
    """`cuts`: lengths of what rank 0 holds of a down projection and the head, or of the head alone."""
    model = load(folder, tp_plan=PLANS[name])
    assert excess_read(model, folder) == 0
    copied = check_state(model, folder, tmp_path / "saved")
    down, head = model.model.layers[0].mlp.down_proj.weight, model.lm_head.weight
    for weight, dim, cut in zip((head, down), (0, 1), reversed(cuts), strict=False):
        assert weight.placements == (Shard(dim),)
        assert model.tp_group.rank or weight.to_local().shape[dim] == cut
    assert model.tp_plan["lm_head"].startswith("torch.ColwiseParallel(")
    expected = logits_of(LlamaForCausalLM.from_pretrained(folder))
    copied.resize_token_embeddings(VOCAB + 4)
    longer = logits_of(copied)
    assert longer.shape[-1] == VOCAB + 4
    assert relative(longer[..., :VOCAB], expected) < TOLERANCE


def ours(style: Any) -> Any:
    """The strategy of this package with the name and the arguments of a style; other styles stay."""
    cls = getattr(tp_transformers.strategies, type(style).__name__, None)
    names = {"input_layouts", "output_layouts", "use_local_output"}
    return style if cls is None else cls(**{name: value for name, value in vars(style).items() if name in names})


@pytest.mark.parametrize("size", wide([3, 2], 1))
@on_ranks(heads=(8, 4))
def test_strategies_take_the_layouts_of_styles(folder) -> None:
    """Of torch's tutorial of sequence parallelism; heads and features do not divide by three ranks."""
    plain = ColwiseParallel()  # features of uneven shards are no DTensors
    styles = {**sequence, f"{MLP}.gate_proj": plain, f"{MLP}.up_proj": plain}
    model = load(folder, tp_plan={name: ours(style) for name, style in styles.items()})
    assert model.tp_plan["lm_head"].startswith("ColwiseParallel(")
    check(model, folder)


# -- parallelize_module on parts


@on_ranks()
def test_torch_parallelizes_parts_of_ours(folder, tmp_path) -> None:
    """Ours cuts attention, by heads that do not divide; torch's styles the MLPs, a strategy of ours the head."""
    model = load(folder, tp_plan=ours_in_attention)
    mesh = model.tp_group.device_mesh
    parallelize_module(model, mesh, mlp(**KEPT))
    parallelize_module(model, mesh, {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    parallelize_module(model, mesh, {"lm_head": tp_transformers.strategies.ColwiseParallel(output_layouts=Replicate())})
    tp_transformers.save_sharded(model, tmp_path / "sharded")
    whole = LlamaForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == whole.num_parameters()
    assert held(model) < 0.7 * sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    check_state(model, folder, tmp_path / "saved")
    assert equal_parameters(load(tmp_path / "sharded"), whole)


@on_ranks(3, heads=(6, 3))
def test_ours_parallelizes_parts_of_torch(folder) -> None:
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
    for part, told in ((model.model.norm, "LlamaRMSNorm"), (model.lm_head, "parallel already")):
        with pytest.raises(tp_transformers.PlanError, match=told):
            parallelize_module(part, mesh, ours[f"{MLP}.up_proj"])
    check(model, folder)


@on_ranks(tie_word_embeddings=True)
def test_tied_modules_stay_tied(folder) -> None:
    """The head and the embedding that it is tied to, both by strategies of ours, and by ones that differ."""
    model, other = (load(folder, tp_plan=ours_in_attention) for _ in range(2))
    mesh = model.tp_group.device_mesh
    rules = {"lm_head": STRATEGIES["colwise_rep"], "model.embed_tokens": STRATEGIES["embedding_colwise"]}
    with pytest.raises(tp_transformers.PlanError, match="is tied to one that is sharded otherwise"):
        parallelize_module(other, mesh, rules)
    parallelize_module(model, mesh, {**rules, "model.embed_tokens": STRATEGIES["embedding_rowwise"]})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check(model, folder)


@pytest.mark.parametrize("mode", wide(["shard", "replicate"], 1))
@on_ranks(4, heads=(8, 4))
def test_styles_with_copies_of_the_model(folder, tmp_path, mode) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = load(folder, tp_plan={**attention, **ends, "model.norm": "replicate"}, device_mesh=mesh)
    parallelize_module(model, mesh["tp"], mlp())
    tp_transformers.data_parallel(model, mesh, mode=mode)
    check(model, folder)
    model.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    dist.barrier()
    assert_same_files(folder, tmp_path / "saved")
