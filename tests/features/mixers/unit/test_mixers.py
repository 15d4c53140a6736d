"""Mixers of plans: parts of parameters by heads and groups, and entries that do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from torch import nn

from tp_transformers import PlanError
from tp_transformers.features.mixers.mixer import Mixer, split_mixers
from tp_transformers.plans import Plan, Rule
from tp_transformers.plans.binding import Binding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENTRY = {
    "input": {"joined": ["value", "key", "head"], "by_group": [["key", "value", "head"]]},
    "output": "back",
}


class Mixing(nn.Module):
    """Heads of 2 features in groups of 3 features."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.num_heads, self.n_groups = heads, groups
        made = 2 * heads + 3 * groups + heads
        self.joined, self.by_group = nn.Linear(4, made), nn.Linear(4, made)
        self.back = nn.Linear(2 * heads, 4)


class Model(nn.Module):
    """A model of one mixer."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    @property
    def base_model(self) -> nn.Module:
        return self


def bound_to(module: nn.Module, size: int, faults: list[str], rules: dict[str, Rule]) -> Binding:
    bound = Binding(Plan("test", ()), cast("PreTrainedModel", Model(module)), size)
    bound.parameters, bound.faults, bound.module_rules = {}, faults, rules
    return bound


def rows(heads: int, groups: int) -> dict[str, list[tuple[str, int]]]:
    """The kind and the head or group of every row, as it is stored."""
    per_group = heads // groups
    parts = {
        "value": [("value", head) for head in range(heads) for _ in range(2)],
        "key": [("key", group) for group in range(groups) for _ in range(3)],
        "head": [("head", head) for head in range(heads)],
    }
    stored = [
        row
        for group in range(groups)
        for part in ("key", "value", "head")
        for row in parts[part]
        if (row[1] if part == "key" else row[1] // per_group) == group
    ]
    return {"joined": parts["value"] + parts["key"] + parts["head"], "by_group": stored, "back": parts["value"]}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "groups"), [(8, 4), (8, 2), (8, 1), (6, 3), (9, 3), (5, 5)])
def test_a_rank_has_the_rows_of_its_heads_and_of_their_groups(heads, groups, size) -> None:
    faults: list[str] = []
    bound = bound_to(Mixing(heads, groups), size, faults, {})
    cut, splits = split_mixers([Mixer.parse("mixer", ENTRY, faults)], bound)["mixer"], bound.splits
    assert not faults
    for rank in range(size):
        own = {head for start, stop in cut.heads.ranges[rank] for head in range(start, stop)}
        theirs = {head * groups // heads for head in own}
        assert cut.attributes(rank) | {"num_heads": len(own), "n_groups": len(theirs)} == cut.attributes(rank)
        for child, stored in rows(heads, groups).items():
            ranges = splits[f"mixer.{child}"].ranges[rank]
            held = [index for start, stop in ranges for index in range(start, stop)]
            expected = [index for index, (part, at) in enumerate(stored) if at in (theirs if part == "key" else own)]
            assert held == expected, child
    assert all(split.is_complete for split in splits.values())


def test_more_ranks_than_heads_gather_what_projections_make() -> None:
    rules = {f"mixer.{child}": Rule(child, name) for child, name in (("joined", "colwise"), ("back", "rowwise"))}
    rules["mixer.norm"] = Rule("norm", "replicated_with_grad_allreduce")
    bound = bound_to(Mixing(2, 1), 3, [], rules)
    cut = split_mixers([Mixer.parse("mixer", ENTRY, [])], bound)["mixer"]
    assert (cut.heads.widths, cut.groups.widths, bound.splits) == ((2, 2, 2), (1, 1, 1), {})
    assert [rule.strategy for rule in rules.values()] == [
        "colwise_rep",
        "rowwise_rep",
        "replicated_with_grad_allreduce",
    ]
    assert bound.replicated == {"mixer.by_group": "mixer", "mixer.norm": "mixer"}


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"input": "in_proj"}, "it has no output"),
        ({"input": {"in_proj": ["gate"]}, "output": "out_proj"}, "does not map input, local"),
        ({"projections": "in_proj", "output": "out_proj"}, "does not map input, local"),
        ({"input": {"in_proj": []}, "output": "out_proj"}, "does not map input, local"),
        ("in_proj", "it has no output"),
    ],
)
def test_an_entry_that_is_no_mixer(entry, fault) -> None:
    with pytest.raises(PlanError, match=fault):
        Plan.parse({"mixers": {"layers.*.mixer": entry}}, source="mine")


def test_parts_that_do_not_add_up() -> None:
    faults: list[str] = []
    mixer = Mixer.parse("mixer", {**ENTRY, "local": {"back": ["head", "head"]}}, faults)
    split_mixers([mixer], bound_to(Mixing(4, 2), 2, faults, {}))
    assert len(faults) == 1
    assert "of back are not" in faults[0]
