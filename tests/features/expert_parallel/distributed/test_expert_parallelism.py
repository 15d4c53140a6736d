"""Whole experts a rank, chosen in a plan, held against one process."""

from __future__ import annotations

import functools
from pathlib import Path
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
    make_case,
    observe,
)
from tests.support.comparisons import assert_same_tensors, compare_seen
from tests.support.models import excess_read, load, save_as_loaded
from tests.support.pool import Pool
from tests.support.tiers import wide
from tests.support.tiny import MODELS
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve

pytestmark = pytest.mark.distributed

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


def with_complete_experts(name: str, folder: str, reference_file: str, saved: str) -> dict[str, Any]:
    """Run on every rank: load, compare with the reference, save."""
    model = load(folder, getattr(transformers, ARCHITECTURES[name].model), tp_expert_parallel=True)
    reference = torch.load(reference_file)
    seen = observe(model)
    found = compare_seen(model, seen, reference)
    model.save_pretrained(saved)
    experts = [
        tp_transformers.local_tensor(p) for name, p in model.named_parameters() if name.endswith("experts.down_proj")
    ]
    return {
        **found,
        "experts": len(experts[0]),
        "read": excess_read(model, folder),
    }


@pytest.mark.parametrize("size", wide([3, 2], 1))
@pytest.mark.parametrize("name", wide(NAMES, 2))
def test_whole_experts_a_rank(pool: Pool, tmp_path: Path, name: str, size: int) -> None:
    case = make_case(tmp_path, name, 8, 4)
    results = pool.run(size, with_complete_experts, name, case.folder, case.reference, str(tmp_path / "saved"))
    for result in results:
        assert result["logits"] < TOLERANCE
        assert result["tokens"]
        assert result["grads"][1] < 1e-3, result["grads"]
        assert result["read"] == 0  # other ranks' experts are never read
    assert [result["experts"] for result in results] == {2: [2, 2], 3: [2, 1, 1]}[size]
    assert_same_tensors(case.folder, tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MIXTURES if name in MODELS])
def test_complete_experts_of_other_types(pool: Pool, tmp_path: Path, name: str) -> None:
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


def rows_of_one_expert(folder: str, ids: torch.Tensor) -> tuple[list[int], list[int]]:
    """Run on every rank, each with one expert: rows that its products multiply, and tokens routed to it."""
    model = load(folder, transformers.MixtralForCausalLM, tp_expert_parallel=True, experts_implementation="grouped_mm")
    with torch.no_grad(), GroupedRows() as rows:
        output = model(ids, output_router_logits=True)
    chosen = [layer.topk(model.config.num_experts_per_tok).indices for layer in output.router_logits]
    routed = [int((each == dist.get_rank()).sum()) for each in chosen]
    return rows.counts, routed


@pytest.mark.parametrize("tokens", wide([1, 32], 1))
def test_a_single_expert_multiplies_its_own_rows(pool: Pool, tmp_path: Path, tokens: int) -> None:
    case = make_case(tmp_path, "mixtral", 8, 4)
    ids = torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(0))
    found = pool.run(4, rows_of_one_expert, case.folder, ids)
    for counts, routed in found:
        assert counts == [max(rows, 1) for rows in routed for _ in ("up", "down")]
    assert min(rows for _, routed in found for rows in routed) < tokens


def without_tokens(folder: str, **plan: Any) -> tuple[int, ...]:
    """Run on every rank, each with one expert: the shape that experts make of no tokens."""
    model = load(folder, transformers.MixtralForCausalLM, experts_implementation="grouped_mm", **plan)
    experts, hidden = model.model.layers[0].mlp.experts, model.config.hidden_size
    shape: torch.Size = experts(torch.empty(0, hidden), torch.empty(0, 2).long(), torch.empty(0, 2)).shape
    return tuple(shape)


@pytest.mark.parametrize("option", ["tp_expert_parallel", "tp_invariant"])
def test_experts_without_any_token(pool: Pool, tmp_path: Path, option: str) -> None:
    case = make_case(tmp_path, "mixtral", 8, 4)
    found = pool.run(4, functools.partial(without_tokens, **{option: True}), case.folder)
    assert found == [pool.run(1, functools.partial(without_tokens, tp_plan=None), case.folder)[0]] * 4


def test_more_ranks_than_experts_are_refused() -> None:
    model = ARCHITECTURES["mixtral"].make(8, 4)
    plan = Plan.for_model(model).with_options(expert_parallel=True)
    with pytest.raises(tp_transformers.PlanError, match="4 experts cannot be spread over 5 ranks"):
        resolve(plan, model, 5)
