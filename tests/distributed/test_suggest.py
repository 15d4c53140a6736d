"""Suggested plans, held against one process: logits and gradients of architectures that have no plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from tp_transformers.small import inputs, small_model

import tp_transformers
from tests.distributed.test_architectures import GRADIENT_TOLERANCE, LOGITS_TOLERANCE, gradient_errors
from tests.models import relative
from tests.pool import Pool
from tests.unplanned import CONFIGS, unplanned
from tp_transformers.suggest import suggest

pytestmark = pytest.mark.distributed

SHAPES = [(name, 8, 4, 2) for name in CONFIGS] + [("mpt", 7, 7, 3)]
"""(architecture, query heads, KV heads, ranks)."""


def observe(model: Any) -> dict[str, Any]:
    """Logits, and every gradient of their weighted sum."""
    torch.manual_seed(3)
    given = inputs(model)
    logits = model(**given).logits
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(4))).mean().backward()
    return {
        "logits": logits.detach(),
        "grads": {name: param.grad for name, param in model.named_parameters() if param.grad is not None},
    }


def compare(cls: str, folder: str) -> tuple[float, Any]:
    """Run on every rank: load with the suggested plan, compare with one process."""
    with tp_transformers.enable():
        model = getattr(transformers, cls).from_pretrained(
            folder, tp_plan=f"{folder}/plan.yaml", attn_implementation="eager"
        )
    reference = torch.load(f"{folder}/reference.pt")
    seen = observe(model)
    grads = gradient_errors(model, seen["grads"], reference["grads"])
    assert grads.keys() == reference["grads"].keys()
    return relative(seen["logits"], reference["logits"]), max(grads.items(), key=lambda item: item[1])


@pytest.mark.parametrize(("name", "heads", "kv", "size"), SHAPES)
def test_a_suggested_plan_computes_what_one_process_does(
    name: str, heads: int, kv: int, size: int, pool: Pool, tmp_path: Path
) -> None:
    config = unplanned(name, heads, kv)
    model, _ = small_model(config)
    model.save_pretrained(tmp_path)
    torch.save(observe(model), tmp_path / "reference.pt")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(suggest(config).data()))
    for logits, (worst, error) in pool.run(size, compare, CONFIGS[name], str(tmp_path)):
        assert logits <= LOGITS_TOLERANCE
        assert error <= GRADIENT_TOLERANCE, worst
