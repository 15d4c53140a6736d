"""Whole experts a rank, chosen in a plan, held against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tp_transformers
from tests.support.architectures import ARCHITECTURES, make_case, observe
from tests.support.comparisons import assert_same_tensors, compare_seen
from tests.support.models import excess_read, load
from tests.support.pool import Pool
from tests.support.tiers import wide

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-4  # fp32 sums in another order

PLANS = {
    "mixtral": """
model_type: mixtral
extends: mixtral
base_model:
  layers.*.mlp.experts.gate_up_proj: local
  layers.*.mlp.experts.down_proj: local
""",
    "gpt_oss": """
model_type: gpt_oss
extends: gpt_oss
base_model:
  layers.*.mlp.experts.gate_up_proj: local
  layers.*.mlp.experts.gate_up_proj_bias: local
  layers.*.mlp.experts.down_proj: local
  layers.*.mlp.experts.down_proj_bias: local
""",
    "llama4_text": """
model_type: llama4_text
extends: llama4_text
optional:
  layers.*.feed_forward.experts.gate_up_proj: local
  layers.*.feed_forward.experts.down_proj: local
""",
}


def with_plan(name: str, plan: str, folder: str, reference_file: str, saved: str) -> dict[str, Any]:
    """Run on every rank: load, compare with the reference, save."""
    model = load(folder, getattr(transformers, ARCHITECTURES[name].model), tp_plan=plan)
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
@pytest.mark.parametrize("name", sorted(PLANS))
def test_whole_experts_a_rank(pool: Pool, tmp_path: Path, name: str, size: int) -> None:
    case = make_case(tmp_path, name, 8, 4)
    plan = tmp_path / "experts.yaml"
    plan.write_text(PLANS[name])
    results = pool.run(size, with_plan, name, str(plan), case.folder, case.reference, str(tmp_path / "saved"))
    for result in results:
        assert result["logits"] < TOLERANCE
        assert result["tokens"]
        assert result["grads"][1] < 1e-3, result["grads"]
        assert result["read"] == 0  # other ranks' experts are never read
    assert [result["experts"] for result in results] == {2: [2, 2], 3: [2, 1, 1]}[size]
    assert_same_tensors(case.folder, tmp_path / "saved")


def test_more_ranks_than_experts_are_refused(pool: Pool, tmp_path: Path) -> None:
    model = ARCHITECTURES["mixtral"].make(8, 4)
    model.config.save_pretrained(tmp_path)
    plan = tmp_path / "experts.yaml"
    plan.write_text(PLANS["mixtral"])
    resolved = tp_transformers.plans.Plan.from_yaml(plan)
    from tp_transformers.plans.bind import resolve

    with pytest.raises(tp_transformers.PlanError, match="4 experts cannot be spread over 5 ranks"):
        resolve(resolved, model, 5)
