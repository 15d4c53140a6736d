"""Calls that fail on one rank alone: all ranks raise within seconds, and a new process group lets them go on."""

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LogitsProcessor, LogitsProcessorList

from tests.support.comparisons import ranks_agree, relative
from tests.support.models import PROMPTS, load
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.waiting import until
from tp_transformers import MeshError, RemoteRankError, data_parallel, fail_together, renew_process_group
from tp_transformers.features.watch import failure
from tp_transformers.features.watch.calls import WATCHED_CALLS
from tp_transformers.features.watch.poller import POLLER
from tp_transformers.features.watch.process import this_process
from tp_transformers.ranks.mesh import join

GRACE = 1.0
"""Seconds in place of those that ranks usually have to fail alike."""


class BoomError(Exception):
    """What a rank of these tests raises."""


def boom(*_: Any) -> None:
    raise BoomError("on this rank")


class FailsLater(LogitsProcessor):
    def __init__(self, is_bad: bool) -> None:
        self.is_bad = is_bad

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.is_bad and input_ids.shape[1] > PROMPTS.shape[1] + 2:
            boom()
        return scores


def forward(model: Any, is_bad: bool) -> None:
    handle = model.model.layers[1].mlp.register_forward_hook(boom) if is_bad else None
    try:
        model(PROMPTS)
    finally:
        if handle is not None:
            handle.remove()


@torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)  # so that a hook is seen that comes after a graph
def compiled(model: Any, is_bad: bool) -> None:
    model = torch.compile(model, backend="eager")
    model(PROMPTS)
    forward(model, is_bad)


def generate(model: Any, is_bad: bool) -> None:
    model.generate(PROMPTS, max_new_tokens=6, logits_processor=LogitsProcessorList([FailsLater(is_bad)]))


def backward(model: Any, is_bad: bool) -> None:
    loss = model(PROMPTS, labels=PROMPTS).loss
    if is_bad:
        loss.register_hook(boom)
    loss.backward()


def step(model: Any, is_bad: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if is_bad:
        optimizer.register_step_pre_hook(boom)
    for _ in range(2):
        model(PROMPTS, labels=PROMPTS).loss.backward()
        optimizer.step()


def between(model: Any, is_bad: bool) -> None:
    with fail_together(model):
        if is_bad:
            boom()
        model(PROMPTS)


CALLS: dict[str, Callable[[Any, bool], None]] = {
    call.__name__: call for call in (forward, generate, backward, step, between, compiled)
}


def grace(seconds: float = GRACE) -> Any:
    """Context in which ranks have so many seconds to fail alike."""
    return mock.patch.object(failure, "GRACE", seconds)


def backward_of_another_model() -> None:
    """It has nothing to do with the failure of a model that still exists."""
    torch.ones(2, requires_grad=True).sum().backward()


def fail(folder: str, name: str, bad: int) -> str:
    """Run on every rank: rank `bad` fails alone, and all raise it, until they have a new process group."""
    with grace():
        model = load(folder)
        rank, expected = model.tp_group.rank, model(PROMPTS).logits.detach()
        with pytest.raises((BoomError, RemoteRankError)) as raised:
            CALLS[name](model, rank == bad)
        backward_of_another_model()
        with pytest.raises(RemoteRankError) as again:
            model(PROMPTS)
        said = str(again.value)
        assert said.startswith(f"rank {bad} failed with BoomError: on this rank. ")
        assert "in boom\n" in said  # of its traceback
        own = (BoomError, "on this rank") if rank == bad else (RemoteRankError, said)
        assert (raised.type, str(raised.value)) == own
        if name == "step":  # which the other ranks have made
            step = f"got a step of an optimizer that was cut off on rank {bad}; ranks that have made 0 and 1 steps of "
            with pytest.raises(MeshError, match=step):
                renew_process_group(model)
            return said
        torch.rand(1 + rank)  # as dropouts, of which ranks reach some before they notice
        renew_process_group(model)
        model.zero_grad()
        assert relative(model(PROMPTS).logits.detach(), expected) == 0
        assert ranks_agree(torch.rand(2), model.generate(PROMPTS, max_new_tokens=3, do_sample=False))
        return said


@pytest.mark.parametrize("name", wide(["generate", "forward", "backward", "step", "between", "compiled"], 1))
@pytest.mark.parametrize(("size", "bad"), wide([(2, 1), (3, 0), (4, 2)], 1))
def test_all_ranks_raise_what_one_does(pool, cases, name, size, bad) -> None:
    assert len({*pool.run(size, fail, cases(9, 3).folder, name, bad)}) == 1


class InUse(torch.optim.Optimizer):
    """An optimizer that has an instance before the load: torch has put its hooks around the step."""

    tp_scope = "shard"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad)


@on_ranks()
def test_ranks_that_have_made_different_steps_do_not_go_on(folder) -> None:
    """No process group is renewed where rank 1 fails before its second step."""
    InUse([torch.zeros(1)], {})
    with grace():
        model = load(folder)
        optimizer = InUse(model.parameters(), {})

        def train() -> None:
            for is_bad in (False, model.tp_group.rank == 1):
                model(PROMPTS, labels=PROMPTS).loss.backward()
                if is_bad:
                    with fail_together(model):
                        boom()
                optimizer.step()
            model(PROMPTS)

        with pytest.raises((BoomError, RemoteRankError)):
            train()
        told = "got ranks that have made 1 and 2 steps of optimizers.*load the last checkpoint"
        with pytest.raises(MeshError, match=told):
            renew_process_group(model)


@pytest.mark.skipif(not os.path.exists("/proc/self/fdinfo"), reason="other systems do not list what is polled")
@on_ranks()
def test_connections_of_others_than_gloo_stay(folder) -> None:
    """A connection to the other rank that gloo does not know, as NCCL's, outlives gloo's."""
    group = join()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = group.gather(server.getsockname()[1])
        own = socket.create_connection(("127.0.0.1", ports[1])) if group.rank == 0 else server.accept()[0]
    with own, grace():
        model = load(folder)
        with pytest.raises((BoomError, RemoteRankError)):
            forward(model, group.rank == 1)
        with pytest.raises(RuntimeError):  # through gloo
            dist.all_reduce(torch.ones(1))
        own.sendall(b"x")
        own.settimeout(5)
        assert own.recv(1) == b"x"


def fail_in_a_copy(folder: str) -> str:
    """Run on 4 ranks, two copies of a model on two ranks each: what a rank raises where one of them fails alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with grace():
        model = load(folder, device_mesh=mesh)
        data_parallel(model, mesh)
        try:
            for _ in range(2):
                backward(model, dist.get_rank() == 3)
        except (BoomError, RemoteRankError) as error:
            backward_of_another_model()
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow
def test_ranks_of_other_copies_raise_it_too(pool, cases) -> None:
    *others, bad = pool.run(4, fail_in_a_copy, cases(9, 3).folder)
    assert bad == "BoomError: on this rank"
    assert len(set(others)) == 1
    assert others[0].startswith("RemoteRankError: rank 3 failed with BoomError: on this rank. ")


@on_ranks()
def test_errors_of_all_ranks_end_nothing(folder) -> None:
    """They leave the process group as it is."""
    model = load(folder)
    expected = model(PROMPTS).logits.detach()
    for name in ("forward", "generate", "backward", "step", "between"):
        with pytest.raises(BoomError):
            CALLS[name](model, True)
        model.zero_grad()
        assert relative(model(PROMPTS).logits.detach(), expected) == 0


@on_ranks()
def test_models_are_watched_while_they_live(folder) -> None:
    """The patches are in place, and the thread knows a model; a poll that is under way keeps the model for its time."""
    models = [load(folder)]

    def state() -> tuple[bool, bool]:
        gc.collect()
        return all(patch.is_on for patch in WATCHED_CALLS), bool(POLLER.all())

    assert state() == (True, True)
    models.clear()
    until(lambda: state() == (False, False), 30)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="other systems do not show whether a process runs")
@on_ranks()
def test_a_busy_rank_without_heartbeats_is_waited_for(folder) -> None:
    """Rank 1 holds the GIL for longer than the limit."""
    model = load(folder, tp_watch=1)
    before = model(PROMPTS).logits
    if model.tp_group.rank == 1:
        ctypes.PyDLL(None).sleep(3)
    assert relative(model(PROMPTS).logits, before) == 0


def test_a_process_runs_until_it_is_stopped_or_ends() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    try:
        child.stdout.readline()
        own = this_process()
        process = own._replace(number=child.pid, began=Path(f"/proc/{child.pid}/stat").read_text().split()[21])
        assert own.runs
        assert process.runs
        assert not process._replace(began="1").runs  # the id belongs to a later process
        assert not process._replace(machine="another").runs
        assert not process._replace(namespace="another").runs
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert not process.runs
        child.send_signal(signal.SIGCONT)
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.runs  # a zombie
    child.communicate()
    assert not process.runs


@on_ranks()
def test_the_watch_can_be_turned_off(folder) -> None:
    assert not hasattr(load(folder, tp_watch=False), "tp_watch")
