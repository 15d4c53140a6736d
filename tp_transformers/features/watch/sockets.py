"""The TCP connections between ranks, and to their store: end a gloo collective that waits, notice a lost machine.

torch cannot abort gloo (`ProcessGroup.abort` does nothing there), but every waiting operation of gloo raises when one
of its connections ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from ...marks import untyped
from ...torch_api import get_default_store

Ends = tuple[Any, Any]
"""(local address, remote address) of a connection."""


def innermost(store: Store) -> Store:
    """Unwrap the prefixes of `store`; with every renewed process group they would grow."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def store_of_ranks() -> Store | None:
    """A new connection to the launch's store; None if that is a custom store written in Python."""
    try:
        store: Store = untyped(innermost(get_default_store())).clone()
    except RuntimeError:
        return None
    return store


def address_of(store: Store) -> tuple[str, str] | None:
    """The addresses of this process and of `store`, as their connection has them; None if it cannot be found."""
    for _, _, ends in _to(store):
        own, remote = (end[0].removeprefix("::ffff:").partition("%")[0] for end in ends)
        return own, remote
    return None


def limit_silence(store: Store, seconds: float | None) -> None:
    """Let calls of `store` raise once its machine has answered no packet for `seconds`. (Linux; elsewhere, nothing.)

    Otherwise a call waits for many minutes if that machine has lost its power or its network: nothing closes the
    connection. None removes the limit.
    """
    for _, connection, _ in _to(store):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * (seconds or 0)))
        # For a call that waits for an answer: nothing is sent meanwhile.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(seconds is not None))
        if seconds is not None:
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds / 4)))


def connections(store: Store) -> dict[int, Ends]:
    """The TCP connections of this process by file descriptor, without those to `store` and those of NCCL.

    If NCCL's are shut before its abort, its peers end their processes.
    """
    port, polled = _port(store), _polled()
    return {
        descriptor: ends
        for descriptor, _, ends in _all()
        if port not in (ends[0][1], ends[1][1]) and (descriptor in polled or not polled)
    }


def connections_to(port: int) -> dict[int, Ends]:
    """The TCP connections of this process to a `port`, of a store for instance, by file descriptor."""
    return {descriptor: ends for descriptor, _, ends in _all() if ends[1][1] == port}


def _polled() -> set[int]:
    """The descriptors that epoll watches: gloo's connections, not NCCL's. Empty if /proc has no list."""
    found: set[int] = set()
    for path in Path("/proc/self/fdinfo").glob("*"):
        with suppress(OSError):  # it has been closed
            lines = path.read_text().splitlines()
            found.update(int(line.split()[1]) for line in lines if line.startswith("tfd:"))
    return found


def _to(store: Store) -> Iterator[tuple[int, socket.socket, Ends]]:
    """The connections of this process to `store`, as from `_all`."""
    port = _port(store)
    return (entry for entry in _all() if entry[2][1][1] == port)


def _all() -> Iterator[tuple[int, socket.socket, Ends]]:
    """The TCP connections of this process: descriptor, a duplicate that is open until the next one, ends."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with _opened(int(name)) as connection:
            ends = _ends(connection) if connection is not None else None
            if connection is not None and ends is not None:
                yield int(name), connection, ends


def _port(store: Store) -> int | None:
    """The port of `store`; None for a store without."""
    port: int | None = getattr(innermost(store), "port", None)
    return port


def between(own: dict[int, Ends], remote: list[Ends]) -> dict[int, Ends]:
    """The connections in `own` to a remote end in `others`, the connections of the other ranks."""
    remote_ends = set(remote)
    return {descriptor: ends for descriptor, ends in own.items() if (ends[1], ends[0]) in remote_ends}


def shut(links: dict[int, Ends]) -> None:
    """Shut down the connections that are unchanged; a call that waits at either end raises."""
    for descriptor, ends in links.items():
        with _opened(descriptor) as connection, suppress(OSError):
            if connection is not None and _ends(connection) == ends:
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket | None]:
    """A duplicate of a socket, which stays open when gloo closes it; None for other descriptors."""
    connection = None
    with suppress(OSError):
        own = os.dup(descriptor)
        try:
            connection = socket.socket(fileno=own)
        except OSError:
            os.close(own)
    with connection or nullcontext():
        yield connection


def _ends(connection: socket.socket) -> Ends | None:
    """The ends of a TCP connection; None for other sockets, closed ones, and listening ones."""
    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
    try:
        return (connection.getsockname(), connection.getpeername()) if is_tcp else None
    except OSError:
        return None
