"""A Hub on this machine and ranks that know no other, made once for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.support.hub_server import HubServer
from tests.support.pool import Pool


@pytest.fixture(scope="package")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture(scope="package")
def hub_pool(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Ranks that know no other Hub; huggingface_hub reads where it is as it is imported."""
    settings = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path_factory.mktemp("home")),
        "HF_HUB_DOWNLOAD_TIMEOUT": "2",
        "HF_HUB_DISABLE_XET": "1",
    }
    pool = Pool(spawn=True)
    with mock.patch.dict(os.environ, settings):
        pool.run(3, os.getpid)
        yield pool
    pool.close()


@pytest.fixture
def served(hub: HubServer) -> Iterator[HubServer]:
    """The Hub, with nothing on it."""
    hub.forget()
    hub.repositories.clear()
    hub.tokens.clear()
    yield hub
    hub.forget()
