"""Transformers' Trainer on a tensor-parallel model trains and evaluates as one process."""

from __future__ import annotations

import tp_transformers
from tests.support.models import load
from tests.support.on_ranks import on_ranks, refused
from tests.support.training import assert_trained_alike, with_trainer


@on_ranks()
def test_a_process_of_accelerate_for_itself_is_refused(folder, tmp_path) -> None:
    from transformers import Trainer, TrainingArguments

    model = load(folder)
    says = "Trainer: got accelerate's 1 process, expected the 2 ranks that were started"
    with refused(tp_transformers.TensorParallelError, says, "use_cpu=True"):
        Trainer(model, TrainingArguments(str(tmp_path), report_to=[]))


def test_trainer_trains_and_evaluates_as_one_process(pool, cases, tmp_path) -> None:
    folder = cases(9, 3).folder
    for adapted, ways in ((False, ((1, False, True), (2, True, False))), (True, ((1, True, False),))):
        one = str(tmp_path / f"one {adapted}")
        (expected,) = pool.run(1, with_trainer, folder, one, 0, adapted)
        for copies, loss, own in ways:
            saved = str(tmp_path / f"{copies} copies {adapted}")
            results = pool.run(2 * copies, with_trainer, folder, saved, copies, adapted, loss, False, own)
            assert_trained_alike(results, expected, one, saved)
