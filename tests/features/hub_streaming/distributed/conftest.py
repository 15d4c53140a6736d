"""A Hub on this machine and ranks that know no other, made once for the tests of this folder."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from huggingface_hub import constants, hf_api

from tests.support.hub_server import HubServer
from tests.support.pool import TIMEOUT, Pool


@pytest.fixture(scope="package")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def at_hub(endpoint: str, home: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run on every rank: `function(*args)`, where huggingface_hub knows no other Hub."""
    settings = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": f"{home}/hub",
        "HF_TOKEN_PATH": f"{home}/token",
        "HF_HUB_DOWNLOAD_TIMEOUT": 2,
        "HF_HUB_DISABLE_XET": True,
    }
    with ExitStack() as stack:
        for name, value in settings.items():
            assert hasattr(constants, name)
            stack.enter_context(mock.patch.object(constants, name, value))
        stack.enter_context(mock.patch.object(hf_api.api, "endpoint", endpoint))
        return function(*args)


class HubPool(Pool):
    """The ranks of another pool, with one Hub."""

    def __init__(self, pool: Pool, hub: HubServer, home: Path) -> None:
        super().__init__()
        self._pool, self._hub = pool, (hub.endpoint, str(home))

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        return self._pool.run(size, at_hub, *self._hub, function, args, timeout=timeout)


@pytest.fixture(scope="package")
def hub_pool(pool: Pool, hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return HubPool(pool, hub, tmp_path_factory.mktemp("home"))


@pytest.fixture
def served(hub: HubServer) -> Iterator[HubServer]:
    """The Hub, with nothing on it."""
    hub.forget()
    hub.repositories.clear()
    hub.tokens.clear()
    yield hub
    hub.forget()


@pytest.fixture
def offer(served: HubServer, cases: Any) -> Callable[..., str]:
    """`offer(heads, kv_heads, **options)`: put a tiny Llama on the Hub as org/model; returns the model's folder."""

    def add(heads: int, kv_heads: int, **options: Any) -> str:
        folder: str = cases(heads, kv_heads).folder
        served.add("org/model", folder, **options)
        return folder

    return add
