"""The store at which ranks meet, and ranks that do not come."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from tp_transformers.errors import MeshError
from tp_transformers.ranks import mesh
from tp_transformers.ranks.mesh import exchange, find_store


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_store_that_nobody_made(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(mesh, "LATE", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(MeshError, match=f"rank 1: got no store at {host}:{port}"):
        find_store()


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "LATE", timedelta(seconds=0.1))
    store = dist.HashStore()
    store.set("seat 2", "0")
    with pytest.raises(MeshError, match="no sign of rank 1, 3 of 4 within 0 s"):
        exchange(store, "seat", 0, 0, 4)
