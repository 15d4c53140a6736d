"""Suggested plans of hybrids whose classes nobody knows: their mixers are cut, and compute what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.features.infer.distributed.test_suggest import compare_observed, observe
from tests.support.architectures import GRADIENT_TOLERANCE, LOGITS_TOLERANCE
from tests.support.models import load
from tests.support.pool import Pool
from tests.support.tiers import wide
from tests.support.tiny_mixers import MIXERS
from tp_transformers.features.infer.suggestion import suggest
from tp_transformers.features.verify.small_models import model as probe

pytestmark = pytest.mark.distributed


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


def with_suggested_plan(kind: str, folder: str, plan: str, reference: str) -> tuple[float, tuple[str, float]]:
    """Run on every rank: load with the suggested plan, compare with one process."""
    return compare_observed(load(folder, HYBRIDS[kind][1], tp_plan=plan), reference)


@pytest.mark.parametrize(("kind", "size"), wide([(kind, size) for size in (2, 3) for kind in QUICKEST_FIRST], 1))
def test_a_mixer_that_nobody_knows_is_cut(kind: str, size: int, pool: Pool, tmp_path: Path) -> None:
    config_class, cls, mixer, parts = HYBRIDS[kind]
    settings = MIXERS[kind].make(8, 4).config.to_dict()
    config = config_class(
        **{key: value for key, value in settings.items() if key not in ("model_type", "architectures")}
    )
    suggestion = suggest(config, size=size, cls=cls)
    assert suggestion.data()["mixers"][mixer]["input"] == parts
    assert not [name for name in suggestion.replicated if f".{mixer.rpartition('.')[2]}." in name]
    plan, reference, folder = (str(tmp_path / file) for file in ("plan.yaml", "reference.pt", "checkpoint"))
    Path(plan).write_text(suggestion.text("Being proven."))
    model = probe.make(cls, config)
    model.save_pretrained(folder)
    torch.save(observe(model), reference)
    for logits, (param, error) in pool.run(size, with_suggested_plan, kind, folder, plan, reference):
        assert logits <= LOGITS_TOLERANCE
        assert error <= GRADIENT_TOLERANCE, param
