"""A file of several jobs of the reader, and models to save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.saving import Saved, made
from tp_transformers.checkpoint.reading.header import Checkpoint


@pytest.fixture
def big(tmp_path: Path) -> Iterator[tuple[Checkpoint, Path, torch.Tensor]]:
    """A file of several jobs, and the values in it."""
    torch.manual_seed(0)
    values = torch.randint(-99, 99, (1024, 4096), dtype=torch.int16)
    path = tmp_path / "model.safetensors"
    save_file({"x": values}, path)
    with Checkpoint([path]) as checkpoint:
        yield checkpoint, path, values


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    """Three models of one architecture, whose weights and configs differ."""
    return [made(tmp_path_factory.mktemp("model"), seed) for seed in (1, 2, 3)]
