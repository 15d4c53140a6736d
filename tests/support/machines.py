"""Several machines on one: each a network namespace with a host name, boot id, process ids and /dev/shm of its own.

    machine m0 ─ eth0 ─ cable ─┐
    machine m1 ─ eth0 ─ cable ─┴─ a bridge in a namespace that no machine sees

Needs root, Linux and iproute2. A cable is a veth pair, with a rate on request (`tc tbf`). That of m0 may be a program
that holds back and loses packets (`cable.py`), since few kernels have `tc netem`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pytest

from .cable import Cable

ROOT = Path(__file__).parents[2]
PORT = 29500
"""Where the ranks of a launch meet, on the first machine."""
Started = tuple[subprocess.Popen[str], Path]
"""A process, and the file with its output."""
APART = "apart"
"""An interface of each machine, in a network of its own."""
_APART = "10.78.0.1"
SETUP = """
set -e
hostname "$1"; shift
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount --bind "$1" /proc/sys/kernel/random/boot_id; shift
mount --bind "$1" /etc/hosts; shift
mount --bind "$1" "$2"; shift 2
exec "$@"
"""


@cache
def obstacle() -> str:
    """The reason why this process cannot make machines; "" if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)}"
    name = f"tpt{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return made.stderr.strip()
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


needs_machines = pytest.mark.skipif(bool(obstacle()), reason=obstacle())
"""Marks tests that are left out where this process cannot make machines."""


@dataclass
class Machine:
    """A host; its processes see its own folder where the others see theirs."""

    name: str
    namespace: str
    address: str
    folder: Path
    """What this machine has at `Bed.disk`."""
    boot_id: Path
    hosts: Path
    disk: Path
    device: str = ""
    """The other end of its cable, at the bridge."""
    cable: Cable | None = None
    """The program that delays its packets, if asked for."""
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, command: Sequence[str], log: Path, **environment: str) -> Started:
        """Start a command on this machine. Its processes end with it; `log` gets their output."""
        inside = ["sh", "-c", SETUP, "sh", self.name, self.boot_id, self.hosts, self.folder, self.disk, *command]
        outside = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork"]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*outside, "--kill-child", "--mount-proc", *map(str, inside)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
            )
        self.processes.append(process)
        return process, log

    def vanish(self) -> None:
        """Kill all processes, as a power cut does; nothing is said to the others."""
        self.unplug()
        for process in self.processes:
            process.kill()

    def unplug(self) -> None:
        """Pull the cable: packets are lost from now on."""
        self._link("down")

    def plug(self) -> None:
        """Put the cable back."""
        self._link("up")

    def _link(self, state: str) -> None:
        _run("ip", "-n", self.namespace.rpartition("-")[0], "link", "set", self.device, state)


class Bed:
    """Machines that reach one another, as a context manager; it ends all their processes.

    Args:
        folder: an empty folder for what the machines have.
        number: how many machines.
        rate: of each cable, as `tc` takes it ("1gbit"); "" for as fast as this machine is.
        delay: seconds by which a packet from or to the first machine is held back.
        loss: the share of these packets that are lost.
        names: the address that a machine's own name means to itself: the one at which others reach it; "loopback":
            127.0.1.1 alone, as Debian installs it; "apart": that of an interface in a network of no other machine too.
        only_ipv6: no IPv4 address but the loopback's.
    """

    def __init__(
        self,
        folder: Path,
        number: int = 2,
        *,
        rate: str = "",
        delay: float = 0.0,
        loss: float = 0.0,
        names: Literal["reached", "loopback", "apart"] = "reached",
        only_ipv6: bool = False,
    ) -> None:
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._name = f"tpt{uuid.uuid4().hex[:6]}"
        self._rate, self._delay, self._loss, self._names = rate, delay, loss, names
        self.machines: list[Machine] = []
        hosts_of_all = [f"m{index}" for index in range(number)]
        for index, name in enumerate(hosts_of_all):
            own = folder / name
            own.mkdir()
            boot_id, hosts = folder / f"{name}.boot", folder / f"{name}.hosts"
            boot_id.write_text(f"{uuid.uuid4()}\n")
            addresses = [f"fd77::{peer + 1}" if only_ipv6 else f"10.77.0.{peer + 1}" for peer in range(number)]
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            lines += {"reached": [], "loopback": [f"127.0.1.1 {name}"], "apart": [f"{_APART} {name}"]}[names]
            lines += [
                f"{address} {host}"
                for address, host in zip(addresses, hosts_of_all, strict=True)
                if names != "loopback" or host != name
            ]
            hosts.write_text("\n".join(lines) + "\n")
            namespace, device = f"{self._name}-{name}", f"port{index}"
            self.machines.append(Machine(name, namespace, addresses[index], own, boot_id, hosts, self.disk, device))

    @property
    def meeting(self) -> str:
        """The endpoint of a rendezvous on the first machine: its name, if torchrun there cannot tell its address."""
        address = self.machines[0].name if self._names == "loopback" else self.machines[0].address
        return f"[{address}]:{PORT}" if ":" in address else f"{address}:{PORT}"

    def __enter__(self) -> Bed:
        try:
            _run("ip", "netns", "add", self._name)
            _run("ip", "-n", self._name, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._name, "link", "set", "bridge", "up")
            for machine in self.machines:
                self._connect(machine)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _connect(self, machine: Machine) -> None:
        _run("ip", "netns", "add", machine.namespace)
        if machine is self.machines[0] and (self._delay or self._loss):
            machine.cable = Cable(machine.namespace, self._name, machine.device, self._delay, self._loss)
        else:
            inside = ["eth0", "netns", machine.namespace]
            outside = [machine.device, "netns", self._name]
            _run("ip", "link", "add", *inside, "type", "veth", "peer", "name", *outside)
        _run("ip", "-n", self._name, "link", "set", machine.device, "master", "bridge", "up")
        own = ["ip", "-n", machine.namespace]
        _run(*own, "link", "add", APART, "type", "bridge")  # a kernel may lack dummies
        _run(*own, "address", "add", f"{_APART}/24", "dev", APART)
        length = ["/64", "nodad"] if ":" in machine.address else ["/24"]
        _run(*own, "address", "add", machine.address + length[0], "dev", "eth0", *length[1:])
        for device in ("lo", "eth0", APART):
            _run(*own, "link", "set", device, "up")
        if self._rate:
            shape = ["tbf", "rate", self._rate, "burst", "256kb", "latency", "100ms"]
            _run("tc", "-n", machine.namespace, "qdisc", "add", "dev", "eth0", "root", *shape)

    def close(self) -> None:
        """End all processes and remove the namespaces."""
        for machine in self.machines:
            for process in machine.processes:
                process.kill()
                process.wait()
            if machine.cable is not None:
                machine.cable.close()
        for name in (*(machine.namespace for machine in self.machines), self._name):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@dataclass(frozen=True)
class Ended:
    """A launch on one machine that has ended."""

    code: int
    output: str


def launch(
    bed: Bed,
    ranks: Sequence[int],
    *command: str,
    timeout: float = 120.0,
    **starting: Any,
) -> list[Ended]:
    """Run torchrun on the machines of `bed`, with `ranks[i]` ranks on the i-th, and wait until all have ended.

    Args:
        command: what each rank runs, as torchrun takes it.
        timeout: seconds after which those that still run are killed; their code is -9.
        starting: options of `start`.
    """
    started = start(bed, ranks, *command, **starting)
    return [wait(process, output, timeout) for process, output in started]


def start(
    bed: Bed,
    ranks: Sequence[int],
    *command: str,
    environments: Mapping[int, Mapping[str, str]] | None = None,
    numbered: bool = False,
) -> list[Started]:
    """As `launch`, without waiting; nothing is started where ranks[i] is 0.

    Args:
        environments: {machine: variables}.
        numbered: number the machines in torchrun's arguments, in place of a rendezvous.
    """
    started = []
    for index, (machine, number) in enumerate(zip(bed.machines, ranks, strict=False)):
        if not number:
            continue
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(sum(map(bool, ranks)))]
        torchrun += ["--nproc-per-node", str(number)]
        if numbered:
            meeting = ["--master-addr", bed.machines[0].address, "--master-port", str(PORT)]
            torchrun += ["--node-rank", str(index), *meeting]
        else:
            torchrun += ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", bed.meeting]
        path = machine.folder.with_name(f"{machine.name}-{len(machine.processes)}.log")
        variables: dict[str, Any] = dict((environments or {}).get(index, {}))
        started.append(machine.start([*torchrun, *command], path, **variables))
    return started


def wait(process: subprocess.Popen[str], output: Path, timeout: float) -> Ended:
    """Wait for a process, and kill it after `timeout` seconds."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return Ended(process.returncode, output.read_text())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
