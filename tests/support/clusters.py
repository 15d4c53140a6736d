"""Ray and SLURM on the machines of a test bed: real daemons, which start with a script and end with it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from .machines import Bed, Ended, Machine, Started, wait

SLURM = ("munged", "slurmctld", "slurmd", "srun")
_PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"))
_RAY = f"{shlex.quote(sys.executable)} -m ray.scripts.scripts start"
_NODE = "--num-cpus 1 --disable-usage-stats --object-store-memory 200000000"
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={disk}/munge.socket
StateSaveLocation={disk}/state
SlurmdSpoolDir={disk}/spool
SlurmctldPidFile={disk}/slurmctld.pid
SlurmdPidFile={disk}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing_for_ray() -> str:
    """The reason why there is no Ray; "" if it is installed."""
    return "" if find_spec("ray") else "needs ray[train]"


def missing_for_slurm() -> str:
    """The reason why there is no SLURM; "" if its daemons are installed."""
    missing = [name for name in SLURM if shutil.which(name, path=_PATH) is None]
    return f"needs {', '.join(missing)} (Debian's packages slurm-wlm and munge)" if missing else ""


def on_ray(bed: Bed, script: str, timeout: float) -> Ended:
    """Run a shell script on the first machine, once all machines are nodes of a Ray cluster, each with one CPU."""
    first, *others = bed.machines
    up = [f"{bed.disk.parent}/{machine.name}.up" for machine in others]
    for machine, sign in zip(others, up, strict=True):
        join = f"{_RAY} --address {first.address}:6379 --node-ip-address {machine.address} {_NODE}"
        _start(bed, machine, f"until {join}; do sleep 1; done; touch {sign}; sleep {timeout}")
    head = f"{_RAY} --head --node-ip-address {first.address} --port 6379 --include-dashboard false {_NODE}"
    # A socket in /dev/shm has a path that is short enough.
    waits = " && ".join(f"until [ -e {sign} ]; do sleep 0.2; done" for sign in up)
    return _run(
        bed, f"{head} --temp-dir /dev/shm/r && {waits} && {script}", timeout, RAY_ADDRESS=f"{first.address}:6379"
    )


def on_slurm(bed: Bed, script: str, timeout: float) -> Ended:
    """Run a shell script on the first machine, once all are idle nodes of SLURM, each with two GPUs in name."""
    first, *others = bed.machines
    disk, shared = bed.disk, bed.disk.parent
    key = shared / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    nodes = [f"NodeName={each.name} NodeAddr={each.address} CPUs=2 Gres=gpu:2" for each in bed.machines]
    text = _CONFIGURATION.format(first=first.name, address=first.address, disk=disk, nodes="\n".join(nodes))
    (shared / "slurm.conf").write_text(text)
    (shared / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # unused; the other one wants a mounted cgroup
    (shared / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    munge = f"munged --force --key-file {key} --socket munge.socket --pid-file munge.pid --seed-file munge.seed"
    base = f"cd {disk} && mkdir -p state spool && {munge} --log-file munge.log"
    for machine in others:
        _start(bed, machine, f"{base} && slurmd -D -N {machine.name}")
    idle = f'[ "$(sinfo --noheader --Node --states idle 2> /dev/null | wc -l)" = {len(nodes)} ]'
    daemons = f"(slurmctld -D -c & slurmd -D -N {first.name} &) > daemons.log 2>&1"
    return _run(bed, f"{base} && {daemons}; until {idle}; do sleep 0.5; done; {script}", timeout)


def _start(bed: Bed, machine: Machine, script: str, **variables: str) -> Started:
    own = {"PATH": _PATH, "HOME": str(bed.disk), "SLURM_CONF": f"{bed.disk.parent}/slurm.conf"}
    return machine.start(["sh", "-c", script], bed.disk.parent / f"{machine.name}.log", **own, **variables)


def _run(bed: Bed, script: str, timeout: float, **variables: str) -> Ended:
    return wait(*_start(bed, bed.machines[0], script, **variables), timeout)
