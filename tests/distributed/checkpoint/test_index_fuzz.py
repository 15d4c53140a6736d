"""Mutated indexes: each is one error of ours on all ranks, which names the file or the tensor, or loads."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.fuzz import fuzz_cases, kept
from tests.support.tiers import wide
from tp_transformers import CheckpointError

INDEX = "model.safetensors.index.json"
COUNT = 6
"""Indexes a seed."""

ODD: list[Any] = [
    None,
    True,
    -1,
    1.5,
    "",
    "x",
    "../x.safetensors",
    "/x",
    ".",
    [],
    [1],
    {},
    {"a": "b"},
    "\ud800",
    "a\0b",
    [[]],
]


def mutated(text: str, rng: random.Random) -> bytes:
    index, way = json.loads(text), rng.randrange(5)
    if way == 0:
        index[rng.choice(["weight_map", "metadata"])] = rng.choice(ODD)
    if way == 1:
        index["weight_map"][rng.choice([*index["weight_map"], "more"])] = rng.choice(ODD)
    if way == 2:
        del index[rng.choice(["weight_map", "metadata"])]
    if way == 3:
        index = rng.choice(ODD)
    content = bytearray(json.dumps(index).encode())
    if way == 4:
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def load_mutated(folder: str, texts: list[bytes]) -> list[str | None]:
    """Run on every rank: the error of each index."""
    dist.init_process_group("gloo")
    errors: list[str | None] = []
    for text in texts:
        if dist.get_rank() == 0:
            Path(folder, INDEX).write_bytes(text)
        dist.barrier()
        try:
            with tp_transformers.enable():
                AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
            errors.append(None)
        except CheckpointError as error:
            errors.append(str(error))
        dist.barrier()
    return errors


@pytest.mark.parametrize("seed", wide(range(6), 1))
def test_every_index_loads_or_is_one_error(pool, cases, tmp_path, seed) -> None:
    folder = Path(shutil.copytree(cases(8, 4).folder, tmp_path / "model"))
    good = (folder / INDEX).read_text()
    fuzzed = list(fuzz_cases(seed, COUNT, lambda rng: mutated(good, rng)))
    refused = 0
    for start in range(0, len(fuzzed), COUNT):
        batch = fuzzed[start : start + COUNT]
        with kept(*batch):
            first, second = pool.run(2, load_mutated, str(folder), [case.content for case in batch])
        for case, one, other in zip(batch, first, second, strict=True):
            with kept(case):
                assert one == other
                assert one is None or str(folder) in one or "where the index puts it" in one, one
            refused += one is not None
    assert refused >= len(fuzzed) // 3
