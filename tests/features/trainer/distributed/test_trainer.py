"""Transformers' Trainer on a tensor-parallel model trains and evaluates as one process."""

from __future__ import annotations

from tests.support.comparisons import read_folder, relative, relative_errors
from tests.support.models import load
from tests.support.training import LOSS_TOLERANCE, NORM_TOLERANCE, WEIGHT_TOLERANCE, with_trainer


def on_a_cpu_unasked(folder: str, target: str) -> None:
    """Run on every rank."""
    from transformers import Trainer, TrainingArguments

    model = load(folder)
    Trainer(model, TrainingArguments(target, report_to=[]))


def test_a_process_of_accelerate_for_itself_is_refused(pool, cases, tmp_path) -> None:
    said = pool.error(2, on_a_cpu_unasked, cases(9, 3).folder, str(tmp_path))
    assert "Trainer: got accelerate's 1 process, expected the 2 ranks that were started" in said
    assert "use_cpu=True" in said


def test_trainer_trains_and_evaluates_as_one_process(pool, cases, tmp_path) -> None:
    folder = cases(9, 3).folder
    for adapted, ways in ((False, ((1, False, True), (2, True, False))), (True, ((1, True, False),))):
        saved = str(tmp_path / f"one {adapted}")
        (expected,) = pool.run(1, with_trainer, folder, saved, 0, adapted)
        one = read_folder(saved)
        for copies, loss, own in ways:
            saved = str(tmp_path / f"{copies} copies {adapted}")
            for result in pool.run(2 * copies, with_trainer, folder, saved, copies, adapted, loss, False, own):
                assert len(result["losses"]) == 3
                assert relative(result["losses"], expected["losses"]) < LOSS_TOLERANCE
                assert relative(result["norms"], expected["norms"]) < NORM_TOLERANCE
                assert relative(result["evaluated"], expected["evaluated"]) < LOSS_TOLERANCE
                assert relative(result["predicted"], expected["predicted"]) < WEIGHT_TOLERANCE
                assert result["answers"] == expected["answers"]
                assert result["reloaded"] < WEIGHT_TOLERANCE
            files = read_folder(saved)
            assert max(relative_errors(files, one).values()) < WEIGHT_TOLERANCE
