"""Architectures without a plan of ours: the plan that transformers declares."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import pytest
import torch
import transformers

import tp_transformers
from tests.support.comparisons import compare_seen
from tests.support.models import llama_config, load, observe
from tests.support.needs import needs
from tests.support.pool import WorkerError
from tests.support.tiers import wide
from tp_transformers.logs import warn_once

TOLERANCE = 1e-4  # fp32 sums in another order


def declared(folder: str, reference: str) -> None:
    """Run on every rank: two loads, of which rank 0 tells one, and the numbers of one process."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tp_transformers").addHandler(handler)
    warn_once.cache_clear()  # a warm worker may have told already
    for _ in range(2):
        model = load(folder)
    found = compare_seen(model, observe(model), torch.load(reference))
    assert found["logits"] < TOLERANCE
    assert found["tokens"]
    assert found["grads"][1] < TOLERANCE, found["grads"]
    assert sum("ForCausalLM declares" in record for record in records) == (model.tp_group.rank == 0)


DECLARED: dict[str, dict[str, Any]] = {
    "Helium": {},
    "Exaone4": {},  # norms within heads, which its plan names
    "Apertus": {},  # numbers to learn between the linears of an MLP
    "Beam": {"layer_types": ["full_attention"] * 2},  # a gate and its bias for every head
}
"""Architectures without a plan of ours, and what their configs need."""


@pytest.mark.parametrize("size", wide([3, 2, 4], 1))
@pytest.mark.parametrize("name", wide(sorted(DECLARED, reverse=True), 2))
def test_the_plan_that_transformers_declares_at_any_size(pool, tmp_path, name, size) -> None:
    config, model = getattr(transformers, f"{name}Config", None), getattr(transformers, f"{name}ForCausalLM", None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    model(llama_config(8, 2, kind=config, tie_word_embeddings=True, **DECLARED[name])).save_pretrained(tmp_path / "c")
    torch.save(observe(model.from_pretrained(tmp_path / "c")), tmp_path / "reference.pt")
    pool.run(size, declared, str(tmp_path / "c"), str(tmp_path / "reference.pt"))


def load_only_a_head(folder: str, **options: Any) -> int:
    plan = dataclasses.replace(
        tp_transformers.plans.Plan.from_dict({"lm_head": "colwise_rep"}, source="it"), declared=True
    )
    return len(tp_transformers.local_tensor(load(folder, tp_plan=plan, **options).lm_head.weight))


@needs("refusals")
def test_a_declared_plan_that_leaves_every_layer_whole_is_accepted_only_if_allowed(pool, cases) -> None:
    folder = cases(8, 4).folder
    with pytest.raises(WorkerError) as caught:
        pool.run(2, load_only_a_head, folder)
    for error in caught.value.errors.values():
        assert error.startswith(
            "PlanError: it: got no rule that shards a matrix of model.layers.*, so that each of 2 ranks"
        )
    assert pool.run(2, functools.partial(load_only_a_head, allow_replicated=True), folder) == [100, 99]
