"""Ranks on several machines: the numbers of one process, however the ranks, the files and the networks are."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.comparisons import relative, relative_errors, worst
from tests.support.machine_job import main, train
from tests.support.machines import APART, PORT, SETUP, Bed, Ended, Machine, launch, needs_machines, wait
from tests.support.models import Case, edited
from tests.support.pool import Pool
from tests.support.tiers import wide
from tests.support.training import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from tp_transformers.features.machines.network import INTERFACE

pytestmark = needs_machines
JOB = ("-m", "tests.support.machine_job")
NEW_MOUNTS, NEW_HOST, NEW_MEMORY, NEW_NETWORK = 0x20000, 0x4000000, 0x8000000, 0x40000000
"""Flags of unshare(2) and setns(2)."""


def run(bed: Bed, ranks: Sequence[int], folder: str, options: dict[str, Any], **launching: Any) -> list[Ended]:
    """Run the job on all machines; results of an earlier run are removed."""
    for machine in bed.machines:
        for file in machine.folder.glob("*.pt"):
            file.unlink()
    return launch(bed, ranks, *JOB, folder, str(bed.disk), json.dumps(options), **launching)


def results(bed: Bed, ended: list[Ended], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """What the ranks have saved, each on its own machine."""
    assert not any(machine.code for machine in ended), "\n".join(machine.output for machine in ended)
    found = [torch.load(file) for machine in bed.machines for file in sorted(machine.folder.glob("*.pt"))]
    assert [sum(seen["machine"] == machine.name for seen in found) for machine in bed.machines] == list(ranks)
    return found


def check(found: list[dict[str, Any]], case: Case, losses: list[float]) -> None:
    """Compare with one process: logits, tokens, loss, gradients and the losses of a few steps."""
    reference = torch.load(case.reference)
    for seen in found:
        assert relative(seen["logits"], reference["logits"]) < 1e-5
        assert torch.equal(seen["tokens"], reference["tokens"])
        assert relative(seen["loss"], reference["loss"]) < LOSS_TOLERANCE
        assert worst(relative_errors(seen["grads"], reference["grads"]))[1] < GRADIENT_TOLERANCE
        assert seen["losses"] == pytest.approx(losses, rel=1e-4)


def alone(case: Case, steps: int) -> list[float]:
    """The losses of one process."""
    return train(AutoModelForCausalLM.from_pretrained(case.folder), steps)


def trained(
    bed: Bed, ranks: Sequence[int], case: Case, options: Any = None, folder: str | None = None, **launching: Any
) -> tuple[list[dict[str, Any]], list[Ended]]:
    """What ranks have saved and printed that load a case, from another folder if one is given, and train as alone."""
    ended = run(bed, ranks, folder or case.folder, {"steps": 3, **(options or {})}, **launching)
    found = results(bed, ended, ranks)
    check(found, case, alone(case, 3))
    return found, ended


def on_machine(machines: list[dict[str, Any]], folder: str, options: dict[str, Any]) -> None:
    """Run on every rank of a pool that ends after it: the job on a machine of a test bed, which this rank goes to."""
    rank, libc = int(os.environ["RANK"]), ctypes.CDLL(None, use_errno=True)
    own = Machine(**machines[rank])
    with open(f"/run/netns/{own.namespace}") as network:
        assert libc.unshare(NEW_MOUNTS | NEW_HOST | NEW_MEMORY) == 0, os.strerror(ctypes.get_errno())
        assert libc.setns(network.fileno(), NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    inside = [own.name, own.boot_id, own.hosts, own.folder, own.disk, "true"]
    subprocess.run(["sh", "-c", SETUP, "sh", *map(str, inside)], check=True)
    os.environ.update(LOCAL_RANK="0", MASTER_ADDR="m0", MASTER_PORT=str(PORT))
    main(folder, str(own.disk), options)


def run_in_pool(bed: Bed, ranks: Sequence[int], folder: str, options: dict[str, Any]) -> list[Ended]:
    """As `run` with one rank on each machine, without a start of Python and torchrun."""
    pool, known = Pool(), ("name", "namespace", "address", "folder", "boot_id", "hosts", "disk")
    try:
        pool.run(
            len(ranks), on_machine, [{key: vars(each)[key] for key in known} for each in bed.machines], folder, options
        )
    finally:
        pool.close()
    return [Ended(0, "")] * len(ranks)


@pytest.mark.parametrize(("names", "runs"), wide([("loopback", run_in_pool), ("loopback", run), ("apart", run)], 1))
def test_names_that_no_other_machine_reaches(cases, tmp_path, names, runs) -> None:
    """As Debian installs a machine: its own name is 127.0.1.1 to itself. Or it has another network too."""
    case = cases(9, 3)
    with Bed(tmp_path, 2, names=names) as bed:
        ended = runs(bed, [1, 1], case.folder, {"steps": 3})
        check(results(bed, ended, [1, 1]), case, alone(case, 3))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[3, 1], [2, 1], [1, 2], [1, 1, 1]], ids=str)
def test_uneven_machines(cases, tmp_path, ranks) -> None:
    with Bed(tmp_path, len(ranks)) as bed:
        found, _ = trained(bed, ranks, cases(9, 3))
        assert {seen["transport"] for seen in found} == {"Transport" if max(ranks) == 1 else "SeveralMachines"}


@pytest.mark.slow
def test_ipv6(cases, tmp_path) -> None:
    with Bed(tmp_path, 2, only_ipv6=True) as bed:
        trained(bed, [2, 1], cases(9, 3))


@pytest.mark.slow
def test_a_machine_without_ipv4(cases, tmp_path) -> None:
    """The store is reached by IPv6; of the other's interface, gloo takes the IPv4 address."""
    with Bed(tmp_path, 2, only_ipv6=True) as bed:
        own = ["ip", "-n", bed.machines[1].namespace, "address", "add", "10.77.0.9/24", "dev", "eth0"]
        subprocess.run(own, check=True)
        ended = run(bed, [1, 1], cases(9, 3).folder, {})
        refuses(ended, "MeshError: the machine of rank 1 (m1): got no connection to 10.77.0.9", "IPv4 before IPv6")


LATER = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += 3600;
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec, now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    return now ? (*now = precise.tv_sec) : precise.tv_sec;
}
"""
"""The clock of a machine that is an hour ahead."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_clocks_an_hour_apart(cases, tmp_path) -> None:
    """Torchrun's own rendezvous takes a machine for lost if it was last heard of 15 seconds ago, by its clock."""
    source, library = tmp_path / "later.c", tmp_path / "later.so"
    source.write_text(LATER)
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    with Bed(tmp_path, 2) as bed:
        later = {1: {"LD_PRELOAD": str(library)}}
        found, _ = trained(bed, [2, 1], cases(9, 3), numbered=True, environments=later)
        assert 3500 < found[2]["time"] - found[0]["time"] < 3700


CROSSING = "the tp axis crosses machines"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dp_replicate_size", "fsdp_size"])
def test_copies_across_machines(cases, tmp_path, kind) -> None:
    """By default, the ranks of a copy are on one machine."""
    with Bed(tmp_path, 2) as bed:
        found, ended = trained(bed, [2, 2], cases(9, 3), {"config": {"tp_size": 2, kind: 2}})
        assert {seen["transport"] for seen in found} == {"SharedMemory"}
        assert not any(CROSSING in machine.output for machine in ended)


@pytest.mark.slow
def test_ranks_that_take_turns_over_machines(cases, tmp_path) -> None:
    """As srun numbers them with --distribution=cyclic: each copy of the model is on both machines."""
    case = cases(9, 3)
    with Bed(tmp_path, 2) as bed:
        options = json.dumps({"steps": 3, "config": {"tp_size": 2, "dp_replicate_size": 2}})
        job = [sys.executable, *JOB, case.folder, str(bed.disk), options]
        shared = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
        shared |= {"MASTER_ADDR": "m0", "MASTER_PORT": str(PORT)}
        started = []
        for rank in range(4):
            own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank // 2)}
            started.append(bed.machines[rank % 2].start(job, tmp_path / f"{rank}.log", **own, **shared))
        ended = [wait(process, log, 120) for process, log in started]
        assert [rank.code for rank in ended] == [0] * 4, "\n".join(rank.output for rank in ended)
        check(
            [torch.load(file) for machine in bed.machines for file in machine.folder.glob("*.pt")], case, alone(case, 3)
        )
        assert [rank.output.count(CROSSING) for rank in ended] == [1, 0, 0, 0]


@pytest.mark.slow
def test_a_checkpoint_on_one_machine_alone(cases, tmp_path) -> None:
    with Bed(tmp_path, 2) as bed:
        shutil.copytree(cases(9, 3).folder, bed.machines[0].folder / "model")
        refuses(run(bed, [1, 1], f"{bed.disk}/model", {}), "rank 1: ")


@pytest.mark.slow
def test_another_checkpoint_on_one_machine(cases, tmp_path) -> None:
    """A fine-tune of the same architecture: only the values differ."""
    folder = cases(9, 3).folder
    with Bed(tmp_path, 2) as bed:
        edited(folder, bed.machines[0].folder / "model", lambda tensors: None)
        edited(folder, bed.machines[1].folder / "model", lambda tensors: tensors["lm_head.weight"].add_(1))
        refuses(run(bed, [2, 1], f"{bed.disk}/model", {}), "got another content on rank 2")


@pytest.mark.slow
@pytest.mark.parametrize("library", ["transformers", "tp_transformers"])
def test_another_release_on_one_machine(cases, tmp_path, library) -> None:
    with Bed(tmp_path, 2) as bed:
        ended = run(bed, [1, 1], cases(9, 3).folder, {"release": ["m1", library, "5.6.7"]})
        refuses(ended, "MeshError: the releases: got 'torch", f"{library} 5.6.7")


@pytest.mark.slow
def test_an_interface_that_no_other_machine_reaches(cases, tmp_path) -> None:
    with Bed(tmp_path, 2) as bed:
        ended = run(bed, [2, 1], cases(9, 3).folder, {}, environments={1: {INTERFACE: APART}})
        refuses(ended, "MeshError: the machine of rank 2 (m1): got no connection to 10.78.0.1", INTERFACE)


def refuses(ended: list[Ended], *says: str) -> None:
    """Check that all ranks of all machines raised one error, which says this."""
    assert all(machine.code not in (0, -9) for machine in ended), "\n".join(machine.output for machine in ended)
    raised = {
        line.partition(" ")[2] for machine in ended for line in re.findall("^RAISED (.*)", machine.output, re.MULTILINE)
    }
    assert len(raised) == 1, raised
    assert all(text in raised.copy().pop() for text in says), raised
    for machine in ended:
        assert "RAISED" in machine.output
