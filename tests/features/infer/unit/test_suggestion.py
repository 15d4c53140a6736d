"""Plans that are inferred: modules that are cut in architectures with and without a plan, and reasons of the others."""

from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from tests.support.architectures import ARCHITECTURES
from tests.support.fractions import largest_fraction
from tests.support.remote_code import split_by_own_widths, with_code
from tests.support.tiers import sampled, wide
from tests.support.tiny_mixers import MIXERS
from tests.support.unplanned import DBRX_RUNS, unplanned
from tp_transformers import PlanError
from tp_transformers.anatomy import is_inside
from tp_transformers.features.command_line.models import own_class
from tp_transformers.features.infer.suggestion import suggest
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve
from tp_transformers.slices.layout import Layout

FOUND = [name for name in MIXERS if name not in ("zamba2", "kimi_linear", "olmo_hybrid", "rwkv", "xlstm", "minimax")]
"""Mixers that are made up of parts, in models whose other modules are found too."""


def config_of(name: str) -> Any:
    """A tiny config of an architecture that has a plan."""
    architecture = ARCHITECTURES[name]
    config = getattr(transformers, architecture.config)(**architecture.settings(*architecture.variants[0], False))
    config.architectures = [architecture.model]
    return config


@pytest.mark.parametrize("name", sampled(ARCHITECTURES, 6))
def test_it_cuts_as_much_as_a_plan_that_was_written(name) -> None:
    suggestion = suggest(config_of(name))
    written = Plan.for_model(suggestion.model)
    for size in (2, 3):
        resolution = suggestion.resolve(size)
        assert resolution.uncovered == ()
        ours = largest_fraction(suggestion.model, resolve(written, suggestion.model, size).layouts, size)
        assert largest_fraction(suggestion.model, resolution.layouts, size) <= 1.01 * ours, suggestion.replicated


@pytest.mark.parametrize(
    ("name", "share", "whole"),
    [
        ("gptj", 0.51, {}),
        ("mpt", 0.51, {}),
        *[("dbrx", 0.52, {})] * DBRX_RUNS,
        ("falcon_h1", 0.53, {}),
        ("whisper", 0.56, {}),
        ("codegen", 0.71, {"attn.qkv_proj": "query 0-1, value 0-1, key 0-1, query 2-3", "attn.out_proj": "no role"}),
    ],
)
def test_what_is_whole_has_a_reason(name, share, whole) -> None:
    suggestion = suggest(unplanned(name))
    assert largest_fraction(suggestion.model, suggestion.resolve(2).layouts, 2) < share
    assert len(suggestion.replicated) == len(whole)
    for child, reason in whole.items():
        assert [reason in why for module, why in suggestion.replicated.items() if module.endswith(child)] == [True]
        assert reason in suggestion.text("").replace("\n  # ", " ")


def indices(layout: Layout | None) -> Any:
    """The dimension, and what each rank holds of it in order: ranges that meet are one."""
    if layout is None:
        return None
    ranges = layout.split.ranges
    return layout.dim, [[index for start, stop in held for index in range(start, stop)] for held in ranges]


@pytest.mark.parametrize(("heads", "groups"), wide([(8, 2), (8, 1), (4, 4)], 2))
@pytest.mark.parametrize("name", wide(FOUND, 1))
def test_mixers_are_cut_as_by_a_plan_that_was_written(name, heads, groups) -> None:
    model = MIXERS[name].make(heads, groups)
    suggestion = suggest(model.config, cls=type(model))
    written = Plan.for_model(suggestion.model)
    for size in (2, 3):
        found, expected = suggestion.resolve(size), resolve(written, suggestion.model, size)
        mixers = expected.split_heads.keys() - expected.attention.keys()
        inside = [name for name in expected.layouts if any(is_inside(name, mixer) for mixer in mixers)]
        ours, theirs = ({name: indices(each.layouts.get(name)) for name in inside} for each in (found, expected))
        assert ours == theirs
        assert inside
        assert found.uncovered == ()


def test_a_mixer_that_no_part_describes_is_whole() -> None:
    model = MIXERS["rwkv"].make(8, 2)
    suggestion = suggest(model.config, cls=type(model))
    assert not [block for block in suggestion.blocks if block.kind == "mixer"]
    reason = "which is not in rwkv.blocks.*.attention, comes before"
    assert any(reason in why for why in suggestion.replicated.values())


def test_a_true_config_is_seen_in_small() -> None:
    suggestion = suggest(transformers.Phi3Config(pad_token_id=0))
    assert sum(param.numel() for param in suggestion.model.parameters()) > 3e9
    rules = suggestion.data()["base_model"]
    assert rules["layers.*.self_attn.qkv_proj"] == {"strategy": "packed_colwise", "parts": ["query", "key", "value"]}
    assert rules["layers.*.mlp.gate_up_proj"] == {"strategy": "packed_colwise", "parts": 2}
    assert largest_fraction(suggestion.model, suggestion.resolve(3).layouts, 3) < 0.35


def test_widths_have_to_be_there() -> None:
    suggestion = suggest(unplanned("mpt"))
    data = suggestion.data()
    data["base_model"]["norm_f"] = {"strategy": "replicate", "widths": "no_such"}
    with pytest.raises(PlanError, match="norm_f: its LayerNorm has no width no_such"):
        resolve(Plan.parse(data, source="a plan"), suggestion.model, 2)


@pytest.mark.parametrize("sliced", [False, True])
def test_features_that_are_split_by_numbers_of_its_own_stay_whole(tmp_path, sliced) -> None:
    folder = with_code(tmp_path / "model", "fused")
    split_by_own_widths(folder, sliced=sliced)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    suggestion = suggest(config, size=2, cls=own_class(config, trust_remote_code=True))
    assert {block.kind for block in suggestion.blocks} == {"mlp", "vocabulary"}
    assert set(suggestion.replicated) == {"blocks.*.attend.qkv", "blocks.*.attend.back"}
    assert all("shards of 2 fails in blocks.0.attend" in why for why in suggestion.replicated.values())
