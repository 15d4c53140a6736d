"""Suggested plans of architectures that have no plan, hybrids whose classes nobody knows too, against one process."""

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
from tests.support.tiny_mixers import MIXERS
from tests.support.unplanned import CONFIGS, DBRX_RUNS, unplanned
from tp_transformers.features.infer.suggestion import suggest
from tp_transformers.features.verify.small_models import model as probe

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


def with_suggested_plan(kind: str, folder: str, plan: str, reference: str) -> tuple[float, tuple[str, float]]:
    """Run on every rank: load with the suggested plan, compare with one process."""
    cls = HYBRIDS[kind][1] if kind in HYBRIDS else getattr(transformers, kind)
    return compare_observed(load(folder, cls, tp_plan=plan), reference)


def check(pool: Pool, path: Path, size: int, kind: str, model: Any, cls: Any, suggestion: Any) -> None:
    """Save a model, and hold its load with a suggested plan against one process."""
    plan, reference, folder = (str(path / file) for file in ("plan.yaml", "reference.pt", "checkpoint"))
    Path(plan).write_text(suggestion.text("Being proven."))
    model.save_pretrained(folder)
    torch.save(observe(cls.from_pretrained(folder)), reference)  # a load unfreezes Whisper's encoder positions
    for logits, (param, error) in pool.run(size, with_suggested_plan, kind, folder, plan, reference):
        assert logits <= LOGITS_TOLERANCE
        assert error <= GRADIENT_TOLERANCE, param


@pytest.mark.parametrize(("name", "heads", "kv", "size"), wide(SHAPES, 2))
def test_a_suggested_plan_computes_what_one_process_does(name, heads, kv, size, pool, tmp_path) -> None:
    config, cls = unplanned(name, heads, kv), getattr(transformers, CONFIGS[name])
    check(pool, tmp_path, size, CONFIGS[name], probe.make(cls, config), cls, suggest(config, size=size))


def unknown(name: str, known: str) -> tuple[Any, Any]:
    """(config, class) of a type that has no plan, which are those of a known one but for their names.

    They cannot be pickled, as no name of this module leads to them: each rank makes its own when it imports HYBRIDS.
    """
    config = type(
        f"{name}Config", (getattr(transformers, f"{known}Config"),), {"model_type": f"{name.lower()}_nobody_knows"}
    )
    base = getattr(transformers, f"{known}ForCausalLM")
    return config, type(f"{name}ForCausalLM", (base,), {"config_class": config})


STATE_SPACE = {"in_proj": ["value", "value", "key", "key", "head"]}
HYBRIDS: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {
    "bamba": (*unknown("Branches", "Bamba"), "layers.*.mamba", STATE_SPACE),
    "lfm2": (*unknown("Filters", "Lfm2"), "layers.*.conv", {"in_proj": ["value"] * 3}),
    "mamba2": (*unknown("Scans", "Mamba2"), "layers.*.mixer", STATE_SPACE),
    "olmo_hybrid": (
        *unknown("Memories", "OlmoHybrid"),
        "layers.*.linear_attn",
        {"q_proj": "key", "k_proj": "key", "v_proj": "value", "b_proj": "head", "a_proj": "head", "g_proj": "value"},
    ),
    # A gate beside each value, head after head.
    "zamba": (*unknown("Pairs", "Zamba"), "layers.*.mamba", {"in_proj": "value"}),
}
"""Known type -> (config, class, name of the mixer, the parts of its input projection)."""

QUICKEST_FIRST = ("mamba2", "lfm2", "bamba", "olmo_hybrid", "zamba")


@pytest.mark.parametrize(("kind", "size"), wide([(kind, size) for size in (2, 3) for kind in QUICKEST_FIRST], 1))
def test_a_mixer_that_nobody_knows_is_cut(kind, size, pool, tmp_path) -> None:
    config_class, cls, mixer, parts = HYBRIDS[kind]
    settings = MIXERS[kind].make(8, 4).config.to_dict()
    config = config_class(
        **{key: value for key, value in settings.items() if key not in ("model_type", "architectures")}
    )
    suggestion = suggest(config, size=size, cls=cls)
    assert suggestion.data()["mixers"][mixer]["input"] == parts
    assert not [name for name in suggestion.replicated if f".{mixer.rpartition('.')[2]}." in name]
    check(pool, tmp_path, size, kind, probe.make(cls, config), cls, suggestion)
