"""Code of others that a tensor-parallel model cannot be put into: refused, on all ranks, with the remedy."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tp_transformers
from tests.support.comparisons import relative
from tests.support.models import PROMPTS, load, load_both, logits_of
from tests.support.on_ranks import on_ranks
from tests.support.pool import WorkerError


def transformed(model: Any) -> Any:
    return torch.func.vmap(lambda ids: model(ids[None]).logits)(PROMPTS)


def differentiated(model: Any) -> Any:
    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (PROMPTS,)).logits.square().mean()  # type: ignore[no-any-return]

    return torch.func.grad(loss)(dict(model.named_parameters()))


def transformed_layer(model: Any) -> Any:
    """Without a forward of the model around it."""
    return torch.func.vmap(model.model.layers[0].mlp)(torch.ones(2, 3, model.config.hidden_size))


@torch.no_grad()
def transformed_layer_without_gradients(model: Any) -> Any:
    return transformed_layer(model)


def loaded_on_meta(model: Any) -> Any:
    with torch.device("meta"):
        return load(model.config._name_or_path)


REFUSED: dict[Callable[[Any], Any], str] = {
    DistributedDataParallel: "DistributedDataParallel: got a tensor-parallel LlamaForCausalLM.*data_parallel",
    lambda model: Accelerator(cpu=True).prepare(model): r"DistributedDataParallel: .*ParallelismConfig\(tp_size",
    transformed: "torch.func of a tensor-parallel model: got a forward inside of vmap",
    differentiated: "torch.func of a tensor-parallel model",
    transformed_layer: "torch.func of a tensor-parallel model",
    transformed_layer_without_gradients: "torch.func of a tensor-parallel model",
    lambda model: torch.nn.Sequential(model).to("meta"): "the device of a tensor-parallel model: got meta",
    loaded_on_meta: r'tp_plan: got a load inside of torch.device\("meta"\)',
}


@pytest.mark.parametrize("heads", [(9, 3), pytest.param((8, 4), marks=pytest.mark.slow)])
@on_ranks()
def test_code_of_others_is_refused_or_right(folder) -> None:
    """A model whose linears torch has quantised is right."""
    model, whole = load_both(folder)
    for put, message in REFUSED.items():
        with pytest.raises(tp_transformers.UnsupportedError, match=message):
            put(model)
    quantised = [torch.ao.quantization.quantize_dynamic(each, {torch.nn.Linear}) for each in (model, whole)]
    # One process quantises the same values; a rank's sums may round to a neighbour.
    assert relative(*map(logits_of, quantised)) < 1e-3


def transform_on_one_rank(folder: str) -> None:
    model = load(folder)
    transformed(model) if model.tp_group.rank == 1 else model(PROMPTS)


def test_a_refusal_on_one_rank_is_told_on_the_others(pool, cases) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(2, transform_on_one_rank, cases(9, 3).folder, timeout=60)
    told = "UnsupportedError: torch.func of a tensor-parallel model: got a forward inside of vmap"
    assert f"RemoteRankError: rank 1 failed with {told}" in caught.value.errors[0]
    assert caught.value.errors[1].startswith(told)


@on_ranks()
def test_models_that_are_whole_take_the_wrapper(folder) -> None:
    """While a tensor-parallel one lives."""
    model, whole = load_both(folder)
    assert torch.isfinite(DistributedDataParallel(whole)(PROMPTS).logits).all()
    assert tp_transformers.is_tensor_parallel(model)


@on_ranks(3)
def test_a_module_in_the_place_of_a_sharded_one_is_refused_or_right(folder) -> None:
    model, full = load_both(folder)
    layer, reference = model.model.layers[0], full.model.layers[0]
    blocks = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), layer.self_attn)
    for name, block in {**blocks, "up_proj": layer.mlp, "down_proj": layer.mlp}.items():
        sharded = getattr(block, name)
        width, features = sharded.weight.shape
        setattr(block, name, torch.nn.Linear(features, width, bias=False))
        with pytest.raises(tp_transformers.UnsupportedError, match=f"{name}: got a Linear in the place of"):
            logits_of(model)
        setattr(block, name, sharded)
    layer.self_attn.k_proj = torch.nn.Sequential(layer.self_attn.k_proj)  # calls the sharded one
    layer.self_attn.v_proj = copy.deepcopy(reference.self_attn.v_proj)
    style = tp_transformers.strategies.STRATEGIES["colwise"]
    parallelize_module(layer.self_attn.v_proj, model.tp_group.device_mesh, style)
    assert relative(logits_of(model), logits_of(full)) < 1e-5
    for name in ("gate_proj", "up_proj", "down_proj"):  # the whole block computes on all features
        setattr(layer.mlp, name, copy.deepcopy(getattr(reference.mlp, name)))
    assert relative(logits_of(model), logits_of(full)) < 1e-5
