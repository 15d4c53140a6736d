"""transformers' names for expert parallelism after `enable()`, on experts that do not divide, against one process."""

from __future__ import annotations

import copy
import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import tp_transformers
from tests.support.comparisons import full_gradients, relative, relative_errors
from tests.support.models import VOCAB, load
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.training import assert_trained_alike, with_trainer

DistributedConfig = pytest.importorskip("transformers.distributed.configuration_utils").DistributedConfig
if not hasattr(DistributedConfig(), "ep_implementation"):
    pytest.skip("this release's DistributedConfig has no ep_implementation", allow_module_level=True)

TOLERANCE = 1e-5  # fp32 sums in another order
EXPERTS = "model.layers.*.mlp.experts"
RANGES = {2: [3, 2], 3: [2, 2, 1], 4: [2, 1, 1, 1], 5: [1, 1, 1, 1, 1]}
"""Ranks -> experts of each, among five."""


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function (experts, KV heads, with auxiliary loss) -> folder of a Mixtral with 6 query heads."""

    @functools.cache
    def make(experts: int, kv_heads: int, auxiliary: bool = True) -> str:
        config = MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=kv_heads,
            num_local_experts=experts,
            output_router_logits=auxiliary,
            initializer_range=0.2,
        )
        torch.manual_seed(experts)
        folder = tmp_path_factory.mktemp("mixtral")
        MixtralForCausalLM(config).save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture
def five_experts(mixtral: Any) -> str:
    return mixtral(5, 3)


@pytest.fixture
def four_experts(mixtral: Any) -> str:
    return mixtral(4, 2)


def batch(index: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(index))


def reduces_to_means() -> bool:
    """Gloo's mean is one; in torch 2.8 it is the sum."""
    received, size = torch.empty(1), dist.get_world_size()
    dist.reduce_scatter_tensor(received, torch.ones(size), op=dist.ReduceOp.AVG)
    return received.item() == 1


@pytest.fixture
def size(fields: dict[str, int]) -> int:
    """Ranks of a configuration."""
    return math.prod(fields.get(name, 1) for name in ("tp_size", "fsdp_size", "dp_replicate_size"))


def check_against_one(folder: str, fields: dict[str, Any], has_means: bool = True) -> Any:
    """Run on every rank: what a forward and a backward compute is that of one process; returns the model.

    has_means: False where the gradients of FSDP2 itself are not the means.
    """
    model = load(folder, tp_plan=None, distributed_config=DistributedConfig(**fields)).train()
    one = AutoModelForCausalLM.from_pretrained(folder).train()
    batches = fields.get("fsdp_size", 1) * fields.get("dp_replicate_size", 1)
    own = dist.get_rank() * batches // dist.get_world_size()
    outputs = model(batch(own), labels=batch(own))
    outputs.loss.backward()
    expected = [one(batch(index), labels=batch(index)) for index in range(batches)]
    torch.stack([each.loss for each in expected]).mean().backward()
    for name in ("logits", "loss", "aux_loss"):
        assert relative(outputs[name], expected[own][name]) < TOLERANCE, name
    assert max(map(relative, outputs.router_logits, expected[own].router_logits)) < TOLERANCE
    grads = relative_errors(full_gradients(model), full_gradients(one))
    assert max(grads.values()) < TOLERANCE or not has_means, grads
    return model


@needs("expert_parallel")
@pytest.mark.parametrize(
    "fields",
    wide(
        [
            {"fsdp_size": 3, "ep_size": 3},
            {"tp_size": 2, "ep_size": 2},
            {"tp_size": 3, "ep_size": 3, "tp_plan": {}},
            {"fsdp_size": 2, "tp_size": 2, "ep_size": 2},
            {"fsdp_size": 4, "ep_size": 2},
            {"tp_size": 2, "ep_size": 2, "enable_sequence_parallel": True},
            {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2},
            {"dp_replicate_size": 2, "tp_size": 2, "ep_size": 2},
            {"fsdp_size": 5, "ep_size": 5},
            {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
            {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
        ],
        2,
    ),
    ids=str,
)
@on_ranks()
def test_experts_are_complete_and_exact(five_experts, tmp_path, fields, size) -> None:
    model, experts, rank = check_against_one(five_experts, fields), fields["ep_size"], dist.get_rank()
    layer = model.model.layers[1]
    # FSDP shards experts over the ranks that hold the same.
    held, among = RANGES[experts][rank % experts], size // experts if "fsdp_size" in fields else 1
    assert len(tp_transformers.local_tensor(layer.mlp.experts.down_proj)) in (held // among, -(-held // among))
    rows: list[Any] = [None] * size
    dist.all_gather_object(rows, len(tp_transformers.local_tensor(layer.self_attn.q_proj.weight)))
    rows = rows[:experts]
    if fields.get("tp_size", 1) == 1:
        assert sum(rows) in (48, 48 + (-48 % experts) * experts)  # FSDP's shards
    elif "tp_plan" in fields:
        assert rows == [48] * experts
    else:
        assert sum(rows) * fields.get("fsdp_size", 1) == 48
    model.save_pretrained(tmp_path / "saved")
    dist.barrier()
    one, again = (AutoModelForCausalLM.from_pretrained(folder) for folder in (five_experts, tmp_path / "saved"))
    assert all(map(torch.equal, one.parameters(), again.parameters()))


@needs("expert_parallel")
@pytest.mark.parametrize(
    "fields",
    wide(
        [
            {"fsdp_size": 2, "tp_size": 2, "ep_size": 4, "ep_implementation": "auto"},
            {"fsdp_size": 2, "ep_size": 2},
            {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
        ],
        2,
    ),
)
@on_ranks()
def test_their_expert_parallelism(four_experts, fields) -> None:
    """transformers shards the model; tokens are exchanged by `ExpertExchange`, or by transformers ("auto")."""
    dist.init_process_group("gloo")
    fields = {"ep_implementation": "tp_transformers", **fields}
    model = check_against_one(four_experts, fields, has_means=reduces_to_means())
    assert not tp_transformers.is_tensor_parallel(model)


def placements(folder: str, ours: bool) -> dict[str, Any]:
    """Run on every rank: the placements of the experts' DTensors, and the shapes of this rank's shards."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    options = {"distributed_config": DistributedConfig(tp_size=2, ep_size=2)}
    model = load(folder, tp_plan=None, **options) if ours else AutoModelForCausalLM.from_pretrained(folder, **options)
    experts = {name: param for name, param in model.named_parameters() if ".experts." in name}
    return {name: (param.placements, param.to_local().shape) for name, param in experts.items()}


@needs("expert_parallel")
def test_experts_in_even_halves_are_dtensors(pool, mixtral) -> None:
    ours, theirs = (pool.run(2, placements, mixtral(4, 2), is_ours) for is_ours in (True, False))
    assert ours == theirs
    assert ours[0]


@needs("expert_parallel")
@pytest.mark.parametrize(
    "fields", wide([{"fsdp_size": 2, "ep_size": 2}, {"tp_size": 2, "ep_size": 2}, {"tp_size": 2}], 2), ids=str
)
@on_ranks()
def test_tokens_of_experts_and_ranks_are_counted(five_experts, fields) -> None:
    one = AutoModelForCausalLM.from_pretrained(five_experts)
    logits = [one(batch(index), output_router_logits=True).router_logits for index in range(fields.get("fsdp_size", 1))]
    expected = {
        f"model.layers.{layer}.mlp.experts": tuple(
            torch.bincount(torch.cat(rows).topk(2).indices.flatten(), minlength=5).tolist()
        )
        for layer, rows in enumerate(zip(*logits, strict=True))
    }
    model = load(five_experts, tp_plan=None, distributed_config=DistributedConfig(**fields))
    counter = tp_transformers.training.ExpertLoad(model)
    own = dist.get_rank() if "fsdp_size" in fields else 0
    model.gradient_checkpointing_enable()
    model.train()(batch(own), labels=batch(own)).loss.backward()  # counted once
    model.eval()(batch(own))  # not counted
    if fields.get("fsdp_size", 1) == 1:  # FSDP makes no copies
        copy.deepcopy(model).train()(batch(own))  # not either: it is another model
    seen = counter.read()
    assert not any(sum(layer.experts) for layer in counter.read().values())
    assert {name: layer.experts for name, layer in seen.items()} == expected
    for layer in seen.values():
        experts, ranks = layer.experts, layer.ranks
        assert ranks == ((sum(experts[:3]), sum(experts[3:])) if "ep_size" in fields else ())
        assert layer.imbalance == max(ranks or experts) * len(ranks or experts) / sum(experts)


@pytest.mark.slow
def test_trainer_gives_each_rank_a_batch(pool, mixtral, tmp_path) -> None:
    folder, saved = mixtral(5, 3, auxiliary=False), [str(tmp_path / name) for name in ("one", "ranks")]
    (expected,) = pool.run(1, with_trainer, folder, saved[0], 0)
    config = DistributedConfig(fsdp_size=2, ep_size=2)
    results = pool.run(2, with_trainer, folder, saved[1], 2, False, False, False, True, config)
    assert_trained_alike(results, expected, *saved)


@needs("expert_parallel")
@pytest.mark.parametrize("fields", [{"tp_size": 2}])
@on_ranks()
def test_the_flag_of_older_releases(five_experts) -> None:
    config = SimpleNamespace(enable_expert_parallel=True)
    layer = load(five_experts, tp_plan=None, distributed_config=config).model.layers[0]
    held = layer.self_attn.q_proj.weight, layer.mlp.experts.down_proj
    assert [len(tp_transformers.local_tensor(param)) for param in held] == [48, (3, 2)[dist.get_rank()]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"}, "'all_to_all' where auto and all_reduce fit"),
        ({"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"}, "where auto and all_to_all fit"),
        ({"tp_size": 2, "ep_size": 2, "ep_plan": {EXPERTS: "ep_router"}}, "got ep_plan with 'ep_router'"),
        ({"fsdp_size": 2, "ep_size": 2}, "got 1 copy of a model on 2 ranks each, expected 1 ranks"),
    ],
)
def test_the_rest_is_refused_by_name(mixtral, fields, expected) -> None:
    with pytest.raises(tp_transformers.TensorParallelError, match=expected):
        load(mixtral(5, 3), tp_plan=None, distributed_config=DistributedConfig(**fields))


@needs("expert_parallel")
@pytest.mark.parametrize(
    ("fields", "has_experts", "says"),
    [
        (
            {"tp_size": 2, "ep_size": 2, "ep_plan": {"model.layers.*.mlp.expert": "grouped_gemm"}},
            True,
            r"model.layers.\*.mlp.expert: matches no module",
        ),
        ({"tp_size": 2, "ep_size": 2}, False, "has no experts"),
        ({"fsdp_size": 2, "ep_size": 2}, False, "has no experts"),
    ],
)
@on_ranks()
def test_what_does_not_fit_the_model_is_named(folder, five_experts, fields, has_experts, says) -> None:
    config = DistributedConfig(**fields)
    with pytest.raises(tp_transformers.TensorParallelError, match=says):
        load(five_experts if has_experts else folder, tp_plan=None, distributed_config=config)
