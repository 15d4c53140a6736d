"""Port of a server, bound before the model is loaded."""

from __future__ import annotations

import errno
import os
import socket

from ...errors import UsageError


def bound(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to `port` for each address of `host`; the sockets do not listen yet.

    Raises UsageError if the port is in use, or the host is not an address of this machine.
    """
    sockets: list[socket.socket] = []
    try:
        if not 0 <= port < 1 << 16:  # getaddrinfo would take it modulo 65536
            raise OSError("no number of a port")
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in dict.fromkeys(addresses):
            try:
                opened = socket.socket(family, kind, protocol)
            except OSError:  # no IPv6
                continue
            sockets.append(opened)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a server that has just ended
            if family == socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                opened.bind(place)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or len(addresses) == 1:
                    raise
                sockets.pop().close()
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as error:
        for opened in sockets:
            opened.close()
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        fix = "Give another with --port, or end the process that has it."
        raise UsageError(f"port {port} of {host}", got=reason, expected="a free one", fix=fix) from None
    return sockets
