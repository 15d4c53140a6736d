"""The group of a compressed-tensors config that each module has, against what the library itself chooses.

The library's choices are recorded: `RECORD=1 python -m pytest FILE`, where compressed-tensors is installed.
"""

from __future__ import annotations

import json
import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tp_transformers import CheckpointError
from tp_transformers.features.quantized.compressed import Compressed, match_targets
from tp_transformers.slices.lazy import Resident

RECORDED = Path(__file__).parents[3] / "data" / "compressed_targets.json"
CASES = 200


class Projection(nn.Linear):
    """A linear of another class."""


class Tower(nn.Module):
    """Linears under names of which one ends, begins or contains another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(2, 64)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.q_proj = nn.Linear(64, 2)


class Layer(nn.Module):
    """Two linears, and one of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 2)
        self.k_proj = Projection(64, 2)
        self.up = nn.Linear(64, 2)


NAMES = [f"layers.{layer}.{name}" for layer in (0, 1) for name in ("q_proj", "k_proj", "up")]
TARGETS = [
    *("Linear", "Embedding", "Projection", "Module", "Layer"),
    *("q_proj", "layers.0.q_proj", "layers.1.up", "proj", "0.up", "embed_tokens", "layers.1"),
    *("re:.*q_proj", "re:layers", r"re:.*\.0\..*", "re:.*proj$", "re:up", "re:.*up", "re:q_proj|.*up", "re:embed"),
]


def random_config(seed: int) -> dict[str, Any]:
    """Two to four groups of one to three targets, told apart by their group size, and names to ignore."""
    choose = random.Random(seed)
    groups = {
        f"group_{index}": {
            "targets": choose.sample(TARGETS, choose.randint(1, 3)),
            "weights": {"num_bits": 8, "strategy": "group", "group_size": 8 << index},
        }
        for index in range(choose.randint(2, 4))
    }
    ignore = choose.sample(TARGETS, 1) if choose.random() < 0.25 else []
    return {"format": "int-quantized", "config_groups": groups, "ignore": ignore}


def chosen(settings: dict[str, Any]) -> list[int | None]:
    """The group size of every module; None for one that is not quantised."""
    tower = Tower()
    form = Compressed.of(settings).located(tower, lambda module: (module, tower.get_submodule(module)))

    def group_of(name: str) -> int | None:
        scheme = form.scheme(name)
        return None if scheme is None else scheme.group

    return [group_of(name) for name in ("embed_tokens", "q_proj", *NAMES)]


def chosen_by_the_library(settings: dict[str, Any]) -> list[int | None]:
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    tower = Tower()
    apply_quantization_config(tower, QuantizationConfig.model_validate(settings), show_progress=False)
    modules = [tower.get_submodule(name) for name in ("embed_tokens", "q_proj", *NAMES)]
    schemes: list[Any] = [getattr(module, "quantization_scheme", None) for module in modules]
    return [None if scheme is None else scheme.weights.group_size for scheme in schemes]


def test_modules_have_the_group_that_the_library_gives_them() -> None:
    configs = [random_config(seed) for seed in range(CASES)]
    if os.environ.get("RECORD"):
        lines = [json.dumps(chosen_by_the_library(config)) for config in configs]
        RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    for config, expected in zip(configs, json.loads(RECORDED.read_text()), strict=True):
        assert chosen(config) == expected, config


def test_targets_are_matched_as_the_library_matches_them() -> None:
    library = pytest.importorskip("compressed_tensors.utils.match")
    for seed in range(1000, 3000):
        config = random_config(seed)
        targets = OrderedDict.fromkeys(
            target for group in config["config_groups"].values() for target in group["targets"]
        )
        for name, module in Tower().named_modules():
            assert match_targets(name, module, targets) == library.match_targets(name, module, targets)


def test_a_module_has_one_name_in_the_checkpoint_and_another_in_the_model() -> None:
    """A target may give either; experts that the model merges were linears."""
    settings = random_config(0)
    sizes = {"model.tower.up": 8, "tower.up": 16, "Linear": 32, "re:.*experts.*": 64}
    settings["ignore"] = []
    settings["config_groups"] = {
        target: {"targets": [target], "weights": {"num_bits": 8, "strategy": "group", "group_size": size}}
        for target, size in sizes.items()
    }

    def group_of(stored: str, name: str, **without: Any) -> int:
        groups = {target: group for target, group in settings["config_groups"].items() if target not in without["but"]}
        form = Compressed.of({**settings, "config_groups": groups}).located(Tower(), lambda _: (name, nn.Linear(1, 1)))
        scheme = form.scheme(stored)
        return scheme.group

    assert group_of("tower.up", "model.tower.up", but=()) == 8
    assert group_of("tower.up", "model.tower.up", but=["model.tower.up"]) == 16
    assert group_of("tower.down", "model.tower.down", but=()) == 32
    assert group_of("m.experts.0.up", "m.experts", but=["Linear"]) == 64


WEIGHTS = {"num_bits": 8, "strategy": "group", "group_size": 16}
STORED = {
    "a.weight": torch.ones(4, 32, dtype=torch.int8),
    "a.weight_scale": torch.ones(4, 2),
    "a.weight_zero_point": torch.full((4, 2), 3, dtype=torch.int8),
}


def read(tensors: dict[str, torch.Tensor], **changes: Any) -> torch.Tensor:
    group = {"targets": ["Linear"], "weights": WEIGHTS}
    settings = {"format": "int-quantized", "config_groups": {"group_0": group}, **changes}
    form = Compressed.of(settings)
    return form.dequantized({name: Resident(tensor) for name, tensor in tensors.items()})["a.weight"].materialize()


def test_stored_zero_points_count_whatever_the_config_says() -> None:
    """As in the library, which subtracts those that it finds."""
    assert torch.equal(read(STORED), torch.full((4, 32), -2.0))
    asymmetric = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | {"symmetric": False}}}
    assert torch.equal(read(STORED, config_groups=asymmetric), torch.full((4, 32), -2.0))
    without = {name: tensor for name, tensor in STORED.items() if "zero" not in name}  # zeros are not stored
    assert torch.equal(read(without, config_groups=asymmetric), torch.ones(4, 32))


@pytest.mark.parametrize(
    ("tensors", "changes", "says"),
    [
        ({"a.weight_g_idx": torch.arange(32)}, {}, "tensor a.weight_g_idx"),
        ({"a.weight_global_scale": torch.ones(1)}, {}, "tensor a.weight_global_scale"),
        ({}, {"ignore": ["re:a"]}, "no group of the config"),
        ({}, {"config_groups": {"group_0": {"targets": ["b"], "weights": WEIGHTS}}}, "no group of the config"),
        ({}, {"format": "pack-quantized"}, "tensor a.weight_packed"),
    ],
)
def test_tensors_that_the_scheme_does_not_read_are_refused(tensors, changes, says) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(STORED | tensors, **changes)
    assert says in str(caught.value)
