"""Connections that are shut: only those that were found, whatever their descriptors have become."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tp_transformers.features.watch.sockets import shut


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    """One end of a TCP connection, the other end of which lives."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
        server.accept()[0],
    ):
        yield connection


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_descriptor_that_becomes_a_file_is_left_alone(
    connected: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo closes its connections in threads of its own, and others open files then."""
    duplicated, found = os.dup, {connected.fileno(): (connected.getsockname(), connected.getpeername())}
    with (tmp_path / "file").open("w") as file:

        def dup(descriptor: int) -> int:
            copied = duplicated(descriptor)
            os.dup2(file.fileno(), connected.fileno())
            return copied

        before = descriptors()
        monkeypatch.setattr(os, "dup", dup)
        shut(found)
        shut(found)
        assert descriptors() == before


def test_a_connection_is_shut_once(connected: socket.socket) -> None:
    found = {connected.fileno(): (connected.getsockname(), connected.getpeername())}
    shut(found)
    assert connected.recv(1) == b""
    shut(found)
