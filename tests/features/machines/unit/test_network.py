"""The interface of a machine, and ranks that do not come."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tp_transformers.errors import MeshError
from tp_transformers.features.machines import network
from tp_transformers.features.machines.network import INTERFACE, Seat, _addresses, _choose, _meet, late_ranks_logged
from tp_transformers.ranks import mesh

HEAD, OTHER = Seat("m0 a", "127.0.0.1", "127.0.1.1"), Seat("m1 b", "10.0.0.2", "10.0.0.1")
NETWORKS = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.168.0.7"], "eth1": ["10.0.0.1"]}
NETWORKS |= {"eth2": ["10.77.0.1", "fd77::1"], "eth3": ["10.0.0.2"]}


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "")
    monkeypatch.delenv(INTERFACE)  # what a test sets is removed after it
    monkeypatch.setattr(network.socket, "if_nameindex", lambda: list(enumerate(NETWORKS)))
    monkeypatch.setattr(network, "_addresses", lambda name: NETWORKS.get(name, []))
    monkeypatch.setattr(network.socket, "gethostbyname", lambda name: "192.168.0.7")


@pytest.mark.parametrize(
    ("seats", "rank", "named", "addresses", "interface"),
    [
        # Ranks beside the store see a loopback; those of the other machine know an address of both.
        ([HEAD, HEAD, OTHER], 0, None, ["10.0.0.1"], "eth1"),
        ([HEAD, HEAD, OTHER], 1, None, ["10.0.0.1"], "eth1"),
        ([HEAD, HEAD, OTHER], 2, None, ["10.0.0.2"], "eth3"),
        # An interface that is named is left.
        ([HEAD, OTHER], 1, "eth9,eth0", ["", "192.168.0.7"], "eth9,eth0"),
        # An address of no interface, as of a service that forwards to the store's machine, is left to gloo.
        ([HEAD, OTHER._replace(store="172.16.0.1")], 0, None, ["192.168.0.7"], None),
        # Of an interface with both kinds, gloo takes an address of the kind by which the store was not reached.
        ([Seat("m0 a", "fd77::1", "fd77::1"), Seat("m1 b", "fd77::2", "fd77::1")], 0, None, ["10.77.0.1"], "eth2"),
    ],
)
def test_a_machine_takes_the_interface_that_others_reach(seats, rank, named, addresses, interface) -> None:
    os.environ |= {INTERFACE: named} if named else {}
    assert _choose(seats, rank) == addresses
    assert os.environ.get(INTERFACE) == interface


def test_the_addresses_of_an_interface(monkeypatch) -> None:
    assert "127.0.0.1" in _addresses("lo")
    assert _addresses("no such one") == []


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("127.0.0.1", "do all of them run, and reach 127.0.0.1:29500, which a firewall has to admit?"),
        ("no-such-host.invalid", "this machine knows no address of no-such-host.invalid .*--local-addr"),
    ],
)
def test_a_rank_that_waits_says_for_what(monkeypatch, caplog, host, says) -> None:
    monkeypatch.setattr(network, "PATIENCE", 0.01)
    for name, value in {"RANK": "1", "MASTER_ADDR": host, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    deadline = time.monotonic() + 20
    with late_ranks_logged():
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.match(f"rank 1 has waited 0 s for the other ranks to start: {says}", caplog.messages[0])


def test_ranks_that_start_again_do_not_meet_those_that_ended(monkeypatch) -> None:
    """torchrun restarts ranks on the store of the earlier ones, of which there may have been more."""
    monkeypatch.setattr(mesh, "LATE", timedelta(seconds=10))
    store = dist.HashStore()

    def seats_of(name: str, rank: int, size: int) -> list[list[str]]:
        seat = Seat(f"{name} {rank}", "", "")
        return mesh.exchange(_meet(store, rank, size, seat), "seat", seat, rank, size)

    for name, size in (("first", 3), ("second", 3), ("third", 2)):
        with ThreadPoolExecutor(size) as threads:
            found = list(threads.map(seats_of, [name] * size, range(size), [size] * size))
        assert found == [[[f"{name} {rank}", "", ""] for rank in range(size)]] * size


def test_rank_0_names_those_that_do_not_come(monkeypatch) -> None:
    monkeypatch.setattr(mesh, "LATE", timedelta(seconds=0.1))
    with pytest.raises(MeshError, match="no sign of rank 1, 2 of 3 within 0 s"):
        _meet(dist.HashStore(), 0, 3, HEAD)
    with pytest.raises(MeshError, match="no sign of rank 0 of 3 within 0 s"):
        _meet(dist.HashStore(), 1, 3, HEAD)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_lost_is_not_taken_for_a_late_rank(rank, monkeypatch) -> None:
    class Lost(dist.Store):
        def set(self, key: str, value: bytes) -> None:
            raise dist.DistStoreError("its machine has gone")

        def check(self, keys: list[str]) -> bool:
            raise dist.DistStoreError("its machine has gone")

    monkeypatch.setattr(mesh, "LATE", timedelta(seconds=0.1))
    with pytest.raises(MeshError, match="no answer of the store at which they meet: its machine has gone"):
        _meet(Lost(), rank, 2, HEAD)
