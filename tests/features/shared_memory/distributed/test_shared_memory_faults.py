"""Ranks that end, stop or fail within collectives through shared memory, and machines where it cannot be had."""

import gc
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.launched import launched
from tests.support.tiers import wide
from tp_transformers.features.shared_memory import joining
from tp_transformers.features.shared_memory.segment import FOLDER, nbytes
from tp_transformers.ranks import direct
from tp_transformers.ranks.direct import BACKEND, connect, transport_of
from tp_transformers.ranks.mesh import join

SUMS = """
import logging, os, sys
import torch
logging.basicConfig(level=logging.INFO)
from tp_transformers.ranks import direct
from tp_transformers.ranks.mesh import join
from tp_transformers.ranks.direct import BACKEND, transport_of

# Imported while it still may: Python's own files may be another user's.
import torch.distributed.distributed_c10d, torch.distributed.device_mesh, torch.distributed.tensor
from tp_transformers import seams
from tp_transformers.features.shared_memory import joining, memory, operators
seams.features()
if os.environ["RANK"] in sys.argv[1:]:
    os.setuid(65534)
group = join()
x = torch.full((300_000,), group.rank + 1.0)
for _ in range(20):
    direct.all_reduce(x, group.process_group)
    x /= group.size
print("memory" if transport_of(group.process_group) is not BACKEND else "gloo", x[0].item(), x[-1].item())
"""


def in_own(options: str) -> str:
    """The command that starts a rank with a /dev/shm of its own."""
    return f"unshare -m sh -ec 'mount -t tmpfs -o {options} tmpfs /dev/shm; exec \"$@\"' sh"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems, as root")
@pytest.mark.parametrize(
    ("scripts", "users", "way", "why"),
    [
        (["", ""], [], "memory", ""),
        ([in_own("size=1m"), ""], [], "gloo", "No space left on device"),
        ([in_own("size=64m,ro"), ""], [], "gloo", "Read-only file system"),
        (["", in_own("size=64m")], [], "gloo", "rank 1 cannot map the memory of rank 0"),
        (["", ""], ["1"], "gloo", "Permission denied"),
        ([in_own("size=64m"), in_own("size=64m")], [], "gloo", "rank 1 cannot map the memory of rank 0"),
    ],
)
def test_memory_is_used_where_all_ranks_see_it(tmp_path, scripts, users, way, why) -> None:
    (tmp_path / "script.py").write_text(SUMS)
    for code, output in launched(2, str(tmp_path / "script.py"), *users, before=scripts, stderr=subprocess.STDOUT):
        assert code == 0, output
        assert f"{way} 1.5 1.5" in output, output
        assert why in output


ENDS_AT_ONCE = """
import os, sys
os.environ["TP_TRANSFORMERS_SHARED_MEMORY"] = "0"
import torch
from tp_transformers.ranks import direct
from tp_transformers.ranks.mesh import join

group = join()
tensors = [torch.ones(300_000) for _ in range(20)]
sys.setswitchinterval(1000)  # gloo's threads, which take the GIL after a collective, get it late
for x in tensors:
    direct.all_reduce(x, group.process_group)
"""


@pytest.mark.parametrize("size", wide([2, 4], 1))
def test_a_process_that_ends_just_after_a_collective_of_gloo_is_not_aborted(tmp_path, size) -> None:
    (tmp_path / "script.py").write_text(ENDS_AT_ONCE)
    assert launched(size, str(tmp_path / "script.py"), stderr=subprocess.STDOUT) == [(0, "")] * size


def test_eight_ranks_fit_into_the_memory_that_docker_gives() -> None:
    assert nbytes(8) <= 64 << 20


FAULTS = """
import os, random, signal, sys, time
import torch
import tp_transformers
from tp_transformers.ranks import direct
from tp_transformers.ranks.mesh import join
from tp_transformers.ranks.direct import BACKEND, transport_of
from tp_transformers.features.watch.calls import load_watched

how, bad, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
group = join()
memory = transport_of(group.process_group)
assert memory is not BACKEND
draws = random.Random(seed)
at, within = draws.randrange(1, 60), draws.random() < 0.5

def fail():
    if how == "raise":
        raise ValueError("on this rank")
    os.kill(os.getpid(), getattr(signal, how))

if group.rank == bad and within:  # between two steps of a collective: its data is written, and it has not counted
    publish, left = memory._publish, [at]
    def failing():
        left[0] -= 1
        if not left[0]:
            fail()
        publish()
    memory._publish = failing
try:
    with load_watched(group, 2.0):
        for step in range(60):
            if step == at and group.rank == bad and not within:
                fail()
            x = torch.full((draws.choice([3, 5000, 700_000]),), 1.0)
            direct.all_reduce(x, group.process_group)
            assert (x == group.size).all()
except Exception as error:
    print(f"raised {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    if group.rank == 0:
        time.sleep(5)  # it keeps the store, in which the others read why
    os._exit(3)
print("went on", flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(17))
@pytest.mark.parametrize("how", ["raise", "SIGSTOP", "SIGKILL"])
def test_a_rank_that_fails_within_collectives_is_told_to_all(tmp_path, how, seed) -> None:
    """Where the bad rank fails in the middle of a step, too."""
    (tmp_path / "script.py").write_text(FAULTS)
    bad = 1 + seed % 2  # rank 0 has the store, if no launcher has
    command, last = [str(tmp_path / "script.py"), how, str(bad), str(seed)], None if how == "raise" else bad
    found = launched(3, *command, last=last, stderr=subprocess.STDOUT)
    says = "failed with ValueError: on this rank" if how == "raise" else "gave no sign of life"
    for rank, (code, output) in enumerate(found):
        if rank != bad:
            assert code == 3, output
            assert f"RemoteRankError: rank {bad} {says}" in output
        elif how == "raise":
            assert code == 3, output


def stays() -> set[Path]:
    """Files of shared memory that are there for longer than ranks take to map them."""
    found = set(FOLDER.glob("tp_transformers-*"))
    deadline = time.monotonic() + 20
    while found and time.monotonic() < deadline:
        time.sleep(0.2)
        found &= set(FOLDER.glob("tp_transformers-*"))
    return found


def many_groups(times: int) -> list[tuple[int, int]]:
    """Run on every rank: descriptors and mapped segments, after some process groups and after `times` more."""
    join()
    found = []
    for rounds in (20, times):
        for number in range(rounds):
            made = dist.new_group()
            connect(made)
            x = torch.tensor([float(number)])
            direct.all_reduce(x, made)
            assert x.item() == number * dist.get_world_size()
            dist.destroy_process_group(made)
            del made
        gc.collect()
        with open("/proc/self/maps") as maps:
            mapped = sum("tp_transformers-" in line for line in maps)
        found.append((len(os.listdir("/proc/self/fd")), mapped))
        dist.barrier()
    return found


@pytest.mark.parametrize("times", wide([50, 1000], 1))
def test_process_groups_leave_nothing_behind(pool, times) -> None:
    for first, last in pool.run(2, many_groups, times):
        assert last[0] <= first[0] + 2
        assert last[1] <= first[1]
    assert not stays()


@pytest.mark.slow
def test_jobs_leave_no_file_and_do_not_disturb_each_other(tmp_path) -> None:
    (tmp_path / "script.py").write_text(SUMS)
    for _ in range(10):  # five at once
        with ThreadPoolExecutor(5) as executor:
            jobs = [executor.submit(launched, 2, str(tmp_path / "script.py")) for _ in range(5)]
        for job in jobs:
            assert all(code == 0 and "memory 1.5 1.5" in output for code, output in job.result())
    assert not stays()


def on_machines(machines: list[str], lengths: list[int]) -> list[Tensor]:
    """Run on every rank: sums and maxima, where the ranks are told that they are on several machines."""
    with mock.patch.object(joining, "machine_name", return_value=machines[int(os.environ["RANK"])]):
        group = join()
    assert transport_of(group.process_group) is not BACKEND
    found = []
    for length in lengths:
        x = torch.randn(length, generator=torch.Generator().manual_seed(length + group.rank))
        largest = x.clone()
        direct.all_reduce(x, group.process_group)
        direct.all_reduce(largest, group.process_group, direct.MAX)
        found += [x, largest, direct.all_gather(x[:5].clone(), group.process_group)]
    assert group.gather(group.rank) == list(range(group.size))
    return found


@pytest.mark.parametrize("machines", wide(["aab", "aabb", "abab", "abbcc"], 1))
def test_ranks_of_several_machines_have_the_same_bits(pool, machines) -> None:
    lengths, size = [1, 1000, 700_000], len(machines)
    ranks = pool.run(size, on_machines, list(machines), lengths)
    for found in ranks[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, ranks[0], strict=True))
    for number, length in enumerate(lengths):
        parts = [torch.randn(length, generator=torch.Generator().manual_seed(length + rank)) for rank in range(size)]
        summed, largest, gathered = ranks[0][3 * number : 3 * number + 3]
        torch.testing.assert_close(summed, torch.stack(parts).double().sum(0).float(), rtol=1e-5, atol=1e-5)
        assert torch.equal(largest, torch.stack(parts).amax(0))
        assert torch.equal(gathered, summed[:5].repeat(size))
