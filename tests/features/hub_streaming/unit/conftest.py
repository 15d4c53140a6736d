"""A Hub on this machine with one model."""

from collections.abc import Iterator

import pytest
from huggingface_hub.utils import close_session

from tests.features.hub_streaming.unit.reads import CONTENT
from tests.support.hub_server import HubServer
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
