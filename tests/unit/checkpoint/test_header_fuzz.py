"""Mutated safetensors files: what safetensors' own reader refuses is refused, what it reads is the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from tests.support.fuzz import fuzz_cases, kept
from tp_transformers import CheckpointError
from tp_transformers.checkpoint.reading.header import Checkpoint

COUNT = 300
"""Files a seed."""

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "empty": torch.ones(0, 4)}
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2.0,
    1e400,
    2**63,
    2**64,
    "",
    "F32",
    "F4",
    "BOOL",
    [],
    [0],
    [1, 2, 3],
    {},
    {"x": "y"},
]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The file with another header or other bytes."""
    length = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + length], content[8 + length :]
    way = rng.randrange(6)
    if way == 0:  # bytes anywhere
        changed = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if way == 1:  # another length
        cut = rng.randint(-4, 4)
        data = data + b"x" * cut if cut > 0 else data[: len(data) + cut]
    if way == 2:  # bytes of the header
        changed = bytearray(text)
        for _ in range(rng.randint(1, 2)):
            changed[rng.randrange(len(changed))] = rng.choice(b'{}[]",:0123456789-. \x00\xffab')
        text = bytes(changed)
    if way == 3:  # a value of the header
        header = json.loads(text)
        entry = header[rng.choice([*TENSORS, "__metadata__"])]
        entry[rng.choice([*entry, "more"])] = rng.choice(ODD)
        text = json.dumps(header).encode()
    if way == 4:  # an entry of the header
        header = json.loads(text)
        header[rng.choice([*header, "more"])] = rng.choice([*ODD, *header.values()])
        text = json.dumps(header).encode()
    if way == 5:  # other text for the same header
        codec = rng.choice(["utf-16", "utf-8-sig", "utf-32", "utf-8"])
        text = text.decode().replace("a", rng.choice(["a", "\\ud800", "\\u0061", "\u00e9"]), 1).encode(codec)
    return len(text).to_bytes(8, "little") + text + data


def by_reference(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, UnicodeDecodeError):
        return None
    except Exception:  # it opens files of dtypes that torch lacks
        return {}


@pytest.mark.parametrize("seed", range(4))
def test_files_that_safetensors_refuses_are_refused(tmp_path, seed) -> None:
    content, path = save(TENSORS, {"format": "pt", "more": "1"}), tmp_path / "x.safetensors"
    read = total = 0
    for case in fuzz_cases(seed, COUNT, lambda rng: mutated(content, rng)):
        total += 1
        with kept(case):
            path.write_bytes(case.content)
            expected = by_reference(path)
            try:
                with Checkpoint([path]) as checkpoint:
                    found = {name: tensor.materialize() for name, tensor in checkpoint.tensors.items()}
            except CheckpointError:
                continue  # it may refuse more: keys that occur twice, dtypes that torch lacks
            assert expected is not None, case.content[:400]
            assert found.keys() == expected.keys()
            assert all(
                torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)) for name, value in expected.items()
            )
            read += 1
    assert read >= total // 20, "some mutations change nothing"
