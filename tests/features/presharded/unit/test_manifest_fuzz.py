"""Mutated manifests of pre-sharded checkpoints: each is one error that names a file, or gives the weights saved."""

import json
import random
from typing import Any

import pytest
import torch

from tests.features.presharded.unit.test_manifest import CUT, write
from tests.support.fuzz import fuzz_cases, kept
from tp_transformers import CheckpointError
from tp_transformers.features.presharded.checkpoint import ShardedCheckpoint
from tp_transformers.features.presharded.manifest import MANIFEST_NAME, Manifest

COUNT = 200
"""Manifests a seed."""
LONGEST = 1500
"""Characters of a message."""

ODD: list[Any] = [None, True, -1, 0, 1, 2, 1.5, 1e400, 2**63, 2**70, "", "x", "0", "F32", "F16", "BOOL", "../x", "a\0b"]
ODD += ["\ud800", "x" * 5000, [], [0], [1], [[]], [[0, 2]], [[[0, 3]], []], [[[0, 1], [1, 2]], [[2, 3]]], {}, {"a": 1}]


def mutated(text: str, rng: random.Random) -> bytes:
    """The manifest with one or two other values, or other bytes."""
    whole = json.loads(text)
    for _ in range(rng.choice([1, 1, 2])):
        found = whole
        while True:
            keys: list[Any] = list(found) if isinstance(found, dict) else list(range(len(found)))
            key = rng.choice(keys) if keys else None
            if key is None:
                break
            if not isinstance(found[key], dict | list) or rng.random() < 0.25:
                way = rng.randrange(4)
                if way == 0:
                    del found[key]
                elif way == 1 and isinstance(found, dict):
                    found[rng.choice(["more", "", *keys])] = found[key]
                else:
                    found[key] = rng.choice(ODD)
                break
            found = found[key]
    content = bytearray(json.dumps(whole).encode())
    if rng.random() < 0.2:
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


@pytest.mark.parametrize("seed", range(2))
def test_manifests_give_the_weights_or_one_error(tmp_path, seed) -> None:
    tensors = {"a": (torch.randn(3, 2), CUT), "b": (torch.randn(4).half(), None), "c": (torch.ones(3, 1), CUT)}
    write(tmp_path, tensors, 2)
    good = (tmp_path / MANIFEST_NAME).read_text()
    read = total = 0
    for case in fuzz_cases(seed, COUNT, lambda rng: mutated(good, rng)):
        total += 1
        with kept(case):
            (tmp_path / MANIFEST_NAME).write_bytes(case.content)
            try:
                manifest = Manifest.find(tmp_path)
                with ShardedCheckpoint(manifest, rank=total % 3) as opened:
                    found = {name: tensor.materialize() for name, tensor in opened.tensors.items()}
            except CheckpointError as error:
                text = str(error)
            else:
                text, read = "", read + 1
                assert found.keys() == tensors.keys()
                assert all(torch.equal(found[name], whole) for name, (whole, _) in tensors.items())
            assert not text or (str(tmp_path) in text and len(text) < LONGEST), text[:2000]
    assert read >= total // 20
