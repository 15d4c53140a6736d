"""Values that all ranks have to hold alike: a save or `generate` tells where random numbers made them differ."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import tp_transformers
from tests.support.models import PROMPTS, load
from tests.support.needs import needs

SAVES = {
    "generate": lambda model, folder: model.generate(PROMPTS, max_new_tokens=1, do_sample=False),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "save_sharded": lambda model, folder: tp_transformers.save_sharded(model, folder),
}


def told(folder: str, target: str, call: str, names: list[str], alike: bool) -> tuple[list[str], dict[str, float]]:
    """Runs on every rank: what is logged by a call after random numbers in place of parameters, and what differs."""
    model = load(folder)
    torch.manual_seed(3 if alike else model.tp_group.rank)
    for name in names:
        nn.init.normal_(model.get_parameter(name))
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tp_transformers")
    logger.addHandler(handler)
    try:
        SAVES[call](model, Path(target))
    finally:
        logger.removeHandler(handler)
    return [text for text in texts if "other values" in text], tp_transformers.debug.check_replicas(model)


NORM, KEYS = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.k_proj.weight"


@needs("full_parameters")
@pytest.mark.parametrize(
    ("heads", "call", "name"),
    [
        ((9, 3), "generate", NORM),
        ((8, 1), "generate", KEYS),
        ((9, 3), "save_pretrained", NORM),
        pytest.param((8, 4), "save_sharded", NORM, marks=pytest.mark.slow),
    ],
)
def test_drift_is_told(pool, cases, tmp_path, heads, call, name) -> None:
    (texts, drifted), (others, _) = pool.run(2, told, cases(*heads).folder, str(tmp_path / "a"), call, [name], False)
    assert list(drifted) == [name]
    assert len(texts) == 1
    assert name in texts[0]
    assert not others


@needs("data_parallel", "full_parameters")
def test_numbers_of_one_seed_do_not_drift(pool, cases, tmp_path) -> None:
    names = [NORM, KEYS, "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"]
    for texts, drifted in pool.run(2, told, cases(8, 1).folder, str(tmp_path / "a"), "generate", names, True):
        assert texts == []
        assert drifted == {}
