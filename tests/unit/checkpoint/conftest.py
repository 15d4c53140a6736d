"""A Hub on this machine with one model, and a file of several jobs of the reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import close_session
from safetensors.torch import save_file

from tests.support.hub_server import HubServer
from tests.support.remote_file import CONTENT
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.features.hub_streaming import tries


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("repository")
    (folder / "model.safetensors").write_bytes(CONTENT)
    (folder / "config.json").write_text("{}")
    with HubServer() as server:
        server.add("org/model", folder)
        yield server
    close_session()


@pytest.fixture
def server(served: HubServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(tries, "FIRST_WAIT", 0.01)
    served.forget()
    yield served
    served.forget()


@pytest.fixture
def big(tmp_path: Path) -> Iterator[tuple[Checkpoint, Path, torch.Tensor]]:
    """A file of several jobs, and the values in it."""
    torch.manual_seed(0)
    values = torch.randint(-99, 99, (1024, 4096), dtype=torch.int16)
    path = tmp_path / "model.safetensors"
    save_file({"x": values}, path)
    with Checkpoint([path]) as checkpoint:
        yield checkpoint, path, values
