"""torchrun's restarts: training goes on from its last save, on the machines that are left, as in one process."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.machine_job import step
from tests.support.machines import Bed, needs_machines, start, wait
from tests.support.resuming_job import RATE
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, needs_machines]
JOB = ("-m", "tests.support.resuming_job")


def losses_of_one_process(folder: str, steps: int) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return [step(model, optimizer) for _ in range(steps)]


def losses_in(output: str) -> dict[int, float]:
    """{step: loss} in the output of the machine that has rank 0."""
    return {int(step): float(loss) for step, loss in re.findall(r"^LOSS (\d+) (.*)", output, re.MULTILINE)}


def runs_in(output: str) -> list[tuple[int, int]]:
    """(ranks, steps that were done) at the start of each run, from one rank of a machine for each."""
    found = re.findall(r"^RESUMED \d+ (\d+) (\d+)", output, re.MULTILINE)
    return list(dict.fromkeys((int(ranks), int(steps)) for ranks, steps in found))


@pytest.mark.parametrize("killed", [0, 2], ids=["on the store's machine", "on the other"])
def test_a_rank_that_is_killed(cases, tmp_path, killed) -> None:
    """All ranks of all machines start again."""
    folder, saves = cases(9, 3).folder, tmp_path / "saves"
    with Bed(tmp_path, 2) as bed:
        options = json.dumps({"steps": 6, "kill": [killed, 3]})
        started = start(bed, [2, 1], "--max-restarts", "1", *JOB, folder, str(saves), options)
        ended = [wait(*each, 180) for each in started]
    assert [each.code for each in ended] == [0, 0], "\n".join(each.output for each in ended)
    found = {step: loss for each in ended for step, loss in losses_in(each.output).items()}
    assert [found[step] for step in range(6)] == pytest.approx(losses_of_one_process(folder, 6), rel=1e-4)
    assert all(runs_in(each.output) == [(3, 0), (3, 3)] for each in ended)


def test_a_machine_that_vanishes_and_comes_back(cases, tmp_path) -> None:
    """Two machines, one, two again: 4 ranks, 2, 4.

    By default, torchrun 2.13 gives a machine that joins later no address of the store: it fails after a minute.
    """
    own_store = {machine: {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} for machine in (0, 1)}
    folder, saves, steps = cases(9, 3).folder, tmp_path / "saves", 120
    elastic = ["--nnodes", "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=3"]
    options = json.dumps({"steps": steps, "pause": 0.3})
    with Bed(tmp_path, 2) as bed:
        run = [*elastic, *JOB, folder, str(saves), options]
        first, _ = start(bed, [2, 2], *run, environments=own_store)
        said = first[1].read_text
        until(lambda: len(losses_in(said())) > 3, said=said)
        bed.machines[1].vanish()
        until(lambda: [ranks for ranks, _ in runs_in(said())] == [4, 2], said=said)
        done = len(losses_in(said()))
        until(lambda: len(losses_in(said())) > done + 3, said=said)
        bed.machines[1].plug()
        (again,) = start(bed, [0, 2], *run, environments=own_store)
        ended = [wait(*each, 180) for each in (first, again)]
    assert [each.code for each in ended] == [0, 0], "\n".join(each.output for each in ended)
    output = ended[0].output
    assert [ranks for ranks, _ in runs_in(output)] == [4, 2, 4], output
    found = losses_in(output)
    assert [found[step] for step in range(steps)] == pytest.approx(losses_of_one_process(folder, steps), rel=1e-3)
