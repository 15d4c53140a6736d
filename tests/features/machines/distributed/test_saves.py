"""Saves on several machines, with a folder that they share and without."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.features.machines.distributed.test_machines import refuses, results, run, trained
from tests.support.comparisons import different_tensors
from tests.support.machines import Bed, Ended, needs_machines

pytestmark = [pytest.mark.slow, needs_machines]


def test_shards_stay_on_their_machines(cases, tmp_path) -> None:
    """Each machine has the files of its ranks; the same ranks load them, others name the file that is missing."""
    case = cases(9, 3)
    with Bed(tmp_path, 2) as bed:
        folder = str(bed.disk / "saved")
        saved = run(bed, [2, 1], case.folder, {"save": ["sharded", folder]})
        results(bed, saved, [2, 1])
        assert "those of ranks [0, 1] on m0, those of ranks [2] on m1" in saved[0].output
        own = [sorted(path.name for path in (machine.folder / "saved").iterdir()) for machine in bed.machines]
        for names in own:
            assert {"config.json", "model.safetensors.index.sharded.json"} <= set(names)
        assert [sum(name.startswith("rank-") for name in names) for names in own] == [2, 1]
        assert not any(name.startswith(".") for names in own for name in names)
        trained(bed, [2, 1], case, folder=folder)
        refuses(
            run(bed, [1, 2], folder, {}), "CheckpointError: rank 1: checkpoint file", "no such file", "copy the rank"
        )
        # In one folder, any ranks load them.
        for file in (bed.machines[1].folder / "saved").glob("rank-*"):
            shutil.copy(file, bed.machines[0].folder / "saved")
        shutil.copytree(bed.machines[0].folder / "saved", bed.machines[1].folder / "saved", dirs_exist_ok=True)
        trained(bed, [1, 1], case, folder=folder)


@pytest.mark.parametrize("kind", ["sharded", "standard"])
def test_a_folder_that_machines_share(cases, tmp_path, kind) -> None:
    case = cases(9, 3)
    shared = tmp_path / "shared"
    shared.mkdir()
    with Bed(tmp_path, 2) as bed:
        saved = run(bed, [2, 1], case.folder, {"save": [kind, str(shared / "saved")]})
        results(bed, saved, [2, 1])
        assert not re.search("do not share|was written on", saved[0].output)
        trained(bed, [1, 1], case, folder=str(shared / "saved"))


def test_a_standard_save_is_on_the_first_machine(cases, tmp_path) -> None:
    case = cases(9, 3)
    with Bed(tmp_path, 2) as bed:
        saved = run(bed, [1, 2], case.folder, {"save": ["standard", str(bed.disk / "saved")]})
        results(bed, saved, [1, 2])
        assert f"{bed.disk}/saved was written on m0; m1 does not have it" in saved[0].output
        assert not (bed.machines[1].folder / "saved").exists()
        written = AutoModelForCausalLM.from_pretrained(bed.machines[0].folder / "saved").state_dict()
    assert not different_tensors(written, AutoModelForCausalLM.from_pretrained(case.folder).state_dict())


@pytest.mark.parametrize("kind", ["sharded", "standard"])
def test_copies_on_other_machines_lack_a_save(cases, tmp_path, kind) -> None:
    """The first copy of the model writes."""
    with Bed(tmp_path, 2) as bed:
        options = {"save": [kind, str(bed.disk / "saved")], "config": {"tp_size": 2, "dp_replicate_size": 2}}
        saved = run(bed, [2, 2], cases(9, 3).folder, options)
        results(bed, saved, [2, 2])
    assert saved[0].output.count("saved was written on m0; m1 does not have it") == 1


@pytest.mark.parametrize("shares", [True, False], ids=["shared folder", "own folders"])
def test_checkpoints_of_trainer(cases, tmp_path, shares) -> None:
    """Training goes on from its middle, to the bit; without a shared folder, once all machines have all files."""
    folder, shared = cases(9, 3).folder, tmp_path / "shared"
    shared.mkdir()
    with Bed(tmp_path, 2) as bed:
        trained = shared / "trained" if shares else bed.disk / "trained"

        def train(target: Path, resumed: Path | None) -> list[Ended]:
            return run(bed, [2, 1], folder, trainer(target, resumed))

        def logged(ended: list[Ended]) -> list[Any]:
            assert not any(machine.code for machine in ended), "\n".join(machine.output for machine in ended)
            return [torch.load(file)["logged"] for machine in bed.machines for file in machine.folder.glob("*.pt")]

        first = logged(train(trained, None))
        assert len(first) == 3
        assert len(first[0]) == 4
        if not shares:
            refuses(train(bed.disk / "early", trained / "checkpoint-2"), "got no config.json on m1", "machines share")
            own = [machine.folder / "trained" for machine in bed.machines]
            shutil.copytree(own[1], own[0], dirs_exist_ok=True)
            shutil.copytree(own[0], own[1], dirs_exist_ok=True)
        assert logged(train(bed.disk / "resumed", trained / "checkpoint-2")) == first


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2},
            "trained: got another folder on m1",
        ),
        ({"save_on_each_node": True}, "got save_on_each_node=True"),
    ],
    ids=["best", "each"],
)
def test_trainer_without_a_shared_folder(cases, tmp_path, settings, says) -> None:
    with Bed(tmp_path, 2) as bed:
        refuses(run(bed, [1, 1], cases(9, 3).folder, trainer(bed.disk / "trained", None, **settings)), says)


def trainer(target: Path, resumed: Path | None, **settings: Any) -> dict[str, Any]:
    """Options of a job that trains with Trainer."""
    own = [str(target), 1, resumed and str(resumed)]
    return {"call": ["tests.features.trainer.distributed.test_resume", "with_trainer", own, settings]}
