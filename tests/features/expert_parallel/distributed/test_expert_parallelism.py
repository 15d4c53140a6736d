"""Whole experts a rank, chosen in a plan, held against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import tp_transformers
from tests.distributed.test_model_types import compare_small_models
from tests.support.architectures import (
    ARCHITECTURES,
    GRADIENT_TOLERANCE,
    LOGITS_TOLERANCE,
    observe,
)
from tests.support.comparisons import assert_same_tensors, compare_seen
from tests.support.models import Case, excess_read, load, save_as_loaded
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.tiny import MODELS
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve

TOLERANCE = 1e-4  # fp32 sums in another order

NAMES = ("gpt_oss", "llama4_text", "mixtral")
MIXTURES = (
    "afmoe",
    "axk2",
    "glm4_moe_lite",
    "glm5_next_text",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v4",
    "inkling2_text",
    "jamba",
    "lfm2_moe",
    "muse_spark_text",
    "nemotron_h",
    "phimoe",
    "zaya",
)
"""Other model types with experts, of `MODELS`."""


@pytest.mark.parametrize("size", wide([3, 2], 1))
@pytest.mark.parametrize("name", wide(NAMES, 2))
@on_ranks()
def test_whole_experts_a_rank(case, tmp_path, name, size) -> None:
    model = load(case.folder, getattr(transformers, ARCHITECTURES[name].model), tp_expert_parallel=True)
    read = excess_read(model, case.folder)
    found = compare_seen(model, observe(model), torch.load(case.reference))
    assert found["logits"] < TOLERANCE
    assert found["tokens"]
    assert found["grads"][1] < 1e-3, found["grads"]
    assert read == 0  # other ranks' experts are never read
    experts = next(param for key, param in model.named_parameters() if key.endswith("experts.down_proj"))
    assert len(tp_transformers.local_tensor(experts)) == {2: [2, 2], 3: [2, 1, 1]}[size][dist.get_rank()]
    model.save_pretrained(tmp_path / "saved")
    dist.barrier()
    assert_same_tensors(case.folder, tmp_path / "saved")


@pytest.fixture
def case(made: Any, name: str) -> Case:
    """A model of an architecture, with its reference."""
    return made(name, (8, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MIXTURES if name in MODELS])
def test_complete_experts_of_other_types(pool, tmp_path, name) -> None:
    save_as_loaded(MODELS[name].make(), tmp_path)
    for found in pool.run(
        2, compare_small_models, {name: str(tmp_path / "checkpoint")}, None, {"tp_expert_parallel": True}
    ):
        assert found[name]["output"] < LOGITS_TOLERANCE, found
        assert found[name]["tokens"]
        assert found[name]["gradients"] < GRADIENT_TOLERANCE, found


class GroupedRows(TorchDispatchMode):
    """Records the number of rows that each grouped product multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default:
            offsets = kwargs["offs"] if "offs" in kwargs else args[2]
            self.counts.append(int(offsets[-1]))
        return func(*args, **kwargs)


@pytest.mark.parametrize("tokens", wide([1, 32], 1))
@on_ranks(4, heads=(8, 4), model="mixtral")
def test_a_single_expert_multiplies_its_own_rows(folder, tokens) -> None:
    """Each rank has one expert: rows that its products multiply, and tokens routed to it."""
    cls, implementation = transformers.MixtralForCausalLM, {"experts_implementation": "grouped_mm"}
    model = load(folder, cls, tp_expert_parallel=True, **implementation)
    ids = torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), GroupedRows() as rows:
        output = model(ids, output_router_logits=True)
    chosen = [layer.topk(model.config.num_experts_per_tok).indices for layer in output.router_logits]
    assert rows.counts == [max(int((each == dist.get_rank()).sum()), 1) for each in chosen for _ in ("up", "down")]
    assert min(int((each == expert).sum()) for each in chosen for expert in range(4)) < tokens


def without_tokens(folder: str, **plan: Any) -> torch.Size:
    """The shape that experts make of no tokens."""
    model = load(folder, transformers.MixtralForCausalLM, experts_implementation="grouped_mm", **plan)
    experts, hidden = model.model.layers[0].mlp.experts, model.config.hidden_size
    return experts(torch.empty(0, hidden), torch.empty(0, 2).long(), torch.empty(0, 2)).shape


@pytest.mark.parametrize("option", ["tp_expert_parallel", "tp_invariant"])
@on_ranks(4, heads=(8, 4), model="mixtral")
def test_experts_without_any_token(folder, option) -> None:
    """Each rank has one expert."""
    assert without_tokens(folder, **{option: True}) == without_tokens(folder, tp_plan=None)


def test_more_ranks_than_experts_are_refused() -> None:
    model = ARCHITECTURES["mixtral"].make(8, 4)
    plan = Plan.for_model(model).with_options(expert_parallel=True)
    with pytest.raises(tp_transformers.PlanError, match="4 experts cannot be spread over 5 ranks"):
        resolve(plan, model, 5)
