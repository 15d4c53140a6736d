"""Suggested plans, held against one process: logits and gradients of architectures that have no plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.architectures import GRADIENT_TOLERANCE, LOGITS_TOLERANCE
from tests.support.comparisons import gradient_errors, relative, worst
from tests.support.models import load
from tests.support.pool import Pool
from tests.support.tiers import wide
from tests.support.unplanned import CONFIGS, DBRX_RUNS, unplanned
from tp_transformers.features.infer.suggestion import suggest
from tp_transformers.features.verify.small_models import model as probe

pytestmark = pytest.mark.distributed

SHAPES = [
    *[(name, 8, 4, 2) for name in CONFIGS],
    *[("mpt", 7, 7, 3), ("falcon_h1", 8, 4, 3)],
    *[("dbrx", 9, 3, 2)] * DBRX_RUNS,
]
"""(architecture, query heads, KV heads, ranks)."""


def observe(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of a batch, and every gradient of their weighted sum."""
    question, *_ = probe.questions(model)
    with torch.no_grad():
        logits = probe.answer(model, question)
    return logits, probe.gradients(model, question)


def compare_observed(model: Any, reference: str) -> tuple[float, tuple[str, float]]:
    """Differences of the logits, and of the worst gradient with its name, from what one process observed."""
    expected_logits, expected = torch.load(reference)
    logits, grads = observe(model)
    return relative(logits, expected_logits), worst(gradient_errors(model, grads, expected))


def with_suggested_plan(cls: str, folder: str, plan: str, reference: str) -> tuple[float, tuple[str, float]]:
    """Run on every rank: load with the suggested plan, compare with one process."""
    return compare_observed(load(folder, getattr(transformers, cls), tp_plan=plan), reference)


@pytest.mark.parametrize(("name", "heads", "kv", "size"), wide(SHAPES, 2))
def test_a_suggested_plan_computes_what_one_process_does(
    name: str, heads: int, kv: int, size: int, pool: Pool, tmp_path: Path
) -> None:
    config = unplanned(name, heads, kv)
    suggestion = suggest(config, size=size)
    plan, reference, folder = (str(tmp_path / file) for file in ("plan.yaml", "reference.pt", "checkpoint"))
    Path(plan).write_text(suggestion.text("Being proven."))
    cls = getattr(transformers, CONFIGS[name])
    probe.make(cls, config).save_pretrained(folder)
    torch.save(observe(cls.from_pretrained(folder)), reference)  # a load unfreezes Whisper's encoder positions
    for logits, (param, error) in pool.run(size, with_suggested_plan, CONFIGS[name], folder, plan, reference):
        assert logits <= LOGITS_TOLERANCE
        assert error <= GRADIENT_TOLERANCE, param
