"""The network between machines: each one's interface to the others, tried before gloo depends on it.

Gloo listens at the address of the host's own name. If that is 127.0.1.1 (Debian), or one of several interfaces, other
machines cannot reach it. So a machine takes the interface through which it reaches the store of the ranks, and the
store's own machine the one at which the others reach the store.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from ...errors import MeshError
from ...logs import get_logger
from ...ranks import mesh
from ...ranks.environment import firsts_of, host_of, local_size, node_name
from ...ranks.group import TensorParallelGroup
from ..watch.sockets import address_of, limit_silence

logger = get_logger(__name__)

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable: the interface, or several with commas between, at which gloo listens."""
SECONDS = 10.0
"""Time for a connection between two machines."""
PATIENCE = 10.0
"""Time until a rank logs that it waits for others to start."""
_SIOCGIFADDR = 0x8915


class Seat(NamedTuple):
    """A rank's place in the network."""

    machine: str
    address: str
    """Its own end of its connection to the store; "" if unknown."""
    store: str
    """The other end."""


@contextmanager
def late_ranks_logged() -> Iterator[None]:
    """Log that this rank waits for the store or for other ranks, once PATIENCE seconds have passed."""
    timer = threading.Timer(PATIENCE, _log_late_ranks)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _log_late_ranks() -> None:
    rank, host, port = (os.environ.get(name, "?") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    try:
        socket.getaddrinfo(host, None)
        where = f"do all of them run, and reach {host}:{port}, which a firewall has to admit?"
    except OSError as error:
        where = (
            f"this machine knows no address of {host} ({error}). torchrun exports the own name of the first machine: "
            "start it there with --local-addr, and an address that all machines reach"
        )
    logger.warning("rank %s has waited %d s for the other ranks to start: %s", rank, PATIENCE, where)


def connect_machines(store: Store, rank: int, size: int) -> Store:
    """Choose the interface of this machine, and check that all machines reach one another at theirs. Collective.

    Sets GLOO_SOCKET_IFNAME unless the environment has it. Chooses and checks nothing if all ranks are on one machine.

    Returns:
        The part of `store` that belongs to these ranks alone: torchrun gives the same store to the ranks that it
        restarts, with the keys of those that ended.

    Raises MeshError on all ranks if one machine does not reach another within SECONDS, or if a rank is late.
    """
    limit_silence(store, SECONDS)
    try:
        seat = Seat(node_name(), *(address_of(store) or ("", "")))
        own = _meet(store, rank, size, seat)
        _connect(own, rank, [Seat(*each) for each in mesh.exchange(own, "seat", seat, rank, size)])
    finally:
        limit_silence(store, None)
    return own


def _meet(store: Store, rank: int, size: int, seat: Seat) -> Store:
    """The part of `store` of these ranks. Collective.

    Each rank asks for its name by a key that no earlier process can have answered; rank 0 answers until all have come.

    Raises MeshError if a rank is late.
    """
    token, asks = uuid.uuid4().hex, PrefixStore("tp_transformers/asks", store)
    if rank:
        with mesh.late_is_error(size, lambda: [0] * (not asks.check([token]))):
            asks.set(str(rank), token)
            asks.wait([token], mesh.LATE)
            return _part(store, asks.get(token).decode())
    own, deadline = _part(store, token), time.monotonic() + mesh.LATE.total_seconds()

    def missing() -> list[int]:
        return [peer for peer in range(1, size) if not own.check([f"seat {peer}"])]

    with mesh.late_is_error(size, missing):
        own.set("seat 0", json.dumps(seat))  # the others would miss it if another rank is late
        while late := missing():
            for peer in late:
                if asks.check([str(peer)]):  # it may be the key of an earlier process: look again
                    asks.set(asks.get(str(peer)).decode(), token)
            if time.monotonic() > deadline:
                raise RuntimeError
            time.sleep(0.01)
    return own


def _part(store: Store, name: str) -> Store:
    return PrefixStore(f"tp_transformers/ranks {name}", store)


def _connect(store: Store, rank: int, seats: list[Seat]) -> None:
    """Choose the interface of this machine, and check that all machines reach one another. Collective."""
    size = len(seats)
    firsts = firsts_of([seat.machine for seat in seats])
    if len(firsts) == 1:
        return
    addresses = _choose(seats, rank)
    with ExitStack() as stack:
        own = [(address, _listen(address, stack)) for address in addresses] if rank in firsts else []
        doors = mesh.exchange(store, "door", own, rank, size)
        others = [index for index in firsts if index != rank] if rank in firsts else []
        tried = [(index, address, _fails(address, port)) for index in others for address, port in doors[index]]
        failed = [each for each in tried if each[-1]]
        for source, targets in enumerate(mesh.exchange(store, "failed", failed, rank, size)):
            for target, address, why in targets:
                asked = f"no connection to {address} from that of rank {source} ({host_of(seats[source].machine)}): "
                raise MeshError(
                    f"the machine of rank {target} ({host_of(seats[target].machine)})",
                    got=f"{asked if address else ''}{why}",
                    expected="machines that reach one another at any port",
                    fix=f"On each machine, export {INTERFACE}=, the name of its interface in the network between them "
                    "(ip address lists them; gloo takes the first address of an interface, IPv4 before IPv6); a "
                    "firewall has to admit all ports.",
                )


def warn_of_crossing(group: TensorParallelGroup) -> None:
    """Warn once if the ranks of a copy of a model are on several machines, where one has ranks enough for it.

    Collective over the `tp` axis.
    """
    machines, local = group.gather(node_name()), local_size() or 0
    if len(set(machines)) > 1 and local >= group.size and group.writes:
        logger.warning(
            "the tp axis crosses machines, and so do two all-reduces of every layer; each machine has %d ranks, enough "
            "for a copy of %d. Let the ranks of a copy follow one another: init_device_mesh with the tp axis last, on "
            "ranks that are numbered machine by machine",
            local,
            group.size,
        )


def _choose(seats: list[Seat], rank: int) -> list[str]:
    """The address of this machine at which gloo listens, for each name in INTERFACE; sets that unless it is set.

    An address is "" if the interface has none.
    """
    names = os.environ.get(INTERFACE)
    if not names:
        address, other_end = seats[rank].address, seats[rank].store
        is_loopback = any(end and ipaddress.ip_address(end).is_loopback for end in (address, other_end))
        if address == other_end or is_loopback:  # the store's own machine
            address = next((seat.store for seat in seats if seat.machine != seats[rank].machine), "")
        names = next((name for _, name in socket.if_nameindex() if address in _addresses(name)), None)
        if names is None:  # for instance the address of a service that forwards to this machine
            with suppress(OSError):
                address = socket.gethostbyname(socket.gethostname())
            return [address]
        os.environ[INTERFACE] = names
        logger.info("rank %d reaches the other machines through %s (%s)", rank, names, address)
    return [next(iter(_addresses(name)), "") for name in names.split(",")]


def _addresses(interface: str) -> list[str]:
    """The addresses of an interface in the order in which gloo looks at them, without those of its link."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        found.append(socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        packed, *_, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(packed))
        if name == interface and not address.is_link_local:
            found.append(str(address))
    return found


def _listen(address: str, stack: ExitStack) -> int:
    """Listen at an address until `stack` is closed. Returns the port; 0 if that is impossible."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError):
        listener = stack.enter_context(socket.create_server((address, 0), family=family, backlog=4096))
        return int(listener.getsockname()[1])
    return 0


def _fails(address: str, port: int) -> str:
    """The reason why no connection can be made; "" if one can."""
    if not address:
        return f"no address of an interface that its {INTERFACE} names"
    try:
        socket.create_connection((address, port), timeout=SECONDS).close()
    except OSError as error:
        return str(error)
    return ""
