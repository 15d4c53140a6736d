"""Trainer's arguments that count, average, gather or split over processes: copies count, not ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

import tp_transformers
from tests.support.comparisons import ranks_agree
from tests.support.models import VOCAB, load
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.training import LOSS_TOLERANCE, NORM_TOLERANCE, arguments_of, model_of, quietly

LENGTHS = [5, 9, 4, 8, 6, 9, 3, 7]
DRAWN = torch.Generator().manual_seed(3)
ROWS = [torch.randint(3, VOCAB, (length,), generator=DRAWN) for length in LENGTHS]


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": ROWS[index], "labels": ROWS[index]}


class RandomRows(Rows):
    """Draws a token of each row, as an augmentation does."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = ROWS[index].clone()
        row[1] = torch.randint(3, VOCAB, ()).item()
        return {"input_ids": row, "labels": row}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Rows()[index] for _ in range(3) for index in range(len(ROWS)))


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
    }


def summed(*parts: Any) -> float:
    """The sum of magnitudes, without padding."""
    tensors = [torch.as_tensor(part) for part in parts]
    return float(sum(tensor[tensor != -100].abs().sum() for tensor in tensors))


@dataclass(frozen=True)
class Way:
    settings: dict[str, Any] = field(default_factory=dict)
    data: type[Any] = Rows
    rows: int = 4
    """Rows of a batch, of all copies together."""
    copies: tuple[int, ...] = (1, 2)
    """Numbers of copies that train as one process."""
    divided: bool = True
    """True if each copy gets its part of `rows` as the argument."""


TOGETHER = {"average_tokens_across_devices": False, "include_num_input_tokens_seen": "all"}
WAYS = {
    "tokens of each copy": Way(TOGETHER, copies=(1,)),
    "tokens of all copies": Way({"include_num_input_tokens_seen": "non_padding"}, copies=(2,)),
    "rebalanced batches": Way({"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2}, rows=2),
    "a stream": Way(data=Stream),
    "random rows": Way(data=RandomRows, copies=(1,)),
    "batches by length": Way({"train_sampling_strategy": "group_by_length"}, copies=(1,)),
    "batches in order": Way({"train_sampling_strategy": "sequential"}),
    "split batches": Way({"accelerator_config": {"split_batches": True}}, divided=False),
    "a split stream": Way({"accelerator_config": {"split_batches": True}}, Stream, divided=False),
    "incomplete batches": Way({"max_steps": -1, "num_train_epochs": 2}, rows=6, copies=(1,)),
    "no incomplete batches": Way({"max_steps": -1, "num_train_epochs": 2, "dataloader_drop_last": True}, rows=6),
    "smoothed labels": Way({"label_smoothing_factor": 0.1}, copies=(1,)),
    "noise": Way({"neftune_noise_alpha": 5.0}, copies=(1,)),
    "other seeds": Way({"seed": 7, "data_seed": 3}),
    "gathered objects": Way({"eval_use_gather_object": True}),
    "metrics of batches": Way({"batch_eval_metrics": True}),
    "inputs for metrics": Way({"include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1}),
    "predictions of batches": Way({"eval_do_concat_batches": False}),
    "losses alone": Way({"prediction_loss_only": True}),
}


@quietly()
def counted(folder: str, target: str, copies: int, name: str) -> dict[str, Any]:
    """Run on every rank: what Trainer logs and counts; `copies`: of the model, or 0 for one process."""
    from transformers import trainer

    from tp_transformers.trainer import Trainer

    way, batches = WAYS[name], 0

    def metrics(given: Any, compute_result: bool = True) -> dict[str, float]:
        nonlocal batches
        batches += 1
        if not compute_result:
            return {}
        both = (given.predictions, given.label_ids)
        parts = zip(*both, strict=True) if isinstance(given.predictions, list) else [both]
        found = {
            "batches": float(batches),
            "predictions": summed(*(logits[labels != -100] for logits, labels in parts)),
        }
        for extra in ("inputs", "losses"):
            if (value := getattr(given, extra, None)) is not None:
                found[extra] = summed(value)
        return found

    steps: list[int] = []
    measured = trainer.speed_metrics

    def speed(*args: Any, num_steps: int | None = None, **kwargs: Any) -> Any:
        steps.extend([] if num_steps is None else [num_steps])
        return measured(*args, num_steps=num_steps, **kwargs)

    settings = {
        "per_device_train_batch_size": way.rows // (max(copies, 1) if way.divided else 1),
        "per_device_eval_batch_size": 4 // (max(copies, 1) if way.divided else 1),
        "max_steps": 3,
        "save_strategy": "no",
        **way.settings,
    }
    with mock.patch.object(trainer, "speed_metrics", speed):
        run = Trainer(
            model=model_of(folder, copies, mode="replicate"),
            args=arguments_of(target, **settings),
            train_dataset=way.data(),
            eval_dataset=Rows(),
            data_collator=padded,
            compute_metrics=metrics,
        )
        run.train()
        seen = run.evaluate()
    history = run.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "grad_norm" in entry],
        "norms": [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
        "metrics": [value for key, value in sorted(seen.items()) if "second" not in key and "time" not in key],
        "counts": [run.state.num_input_tokens_seen, run.state.global_step, run.state.epoch],
        "operations": run.state.total_flos,
        "steps": steps,
    }


@pytest.mark.parametrize("name", wide(WAYS, 3))
def test_copies_count_and_not_ranks(pool, cases, tmp_path, name) -> None:
    folder = cases(9, 3).folder
    (one,) = pool.run(1, counted, folder, str(tmp_path), 0, name)
    assert one["losses"]
    for copies in WAYS[name].copies:
        for result in pool.run(2 * copies, counted, folder, str(tmp_path), copies, name):
            assert result["losses"] == pytest.approx(one["losses"], rel=LOSS_TOLERANCE), copies
            assert result["norms"] == pytest.approx(one["norms"], rel=NORM_TOLERANCE), copies
            assert result["metrics"] == pytest.approx(one["metrics"], rel=LOSS_TOLERANCE), copies
            assert result["counts"] == one["counts"], copies
            if WAYS[name].divided:  # transformers itself does not divide split batches
                assert result["steps"] == one["steps"], copies
            if copies == 1:  # each copy pads its rows to the longest of them
                assert result["operations"] == pytest.approx(one["operations"])


@on_ranks()
def test_batches_that_rank_0_would_slice_are_refused(folder, tmp_path) -> None:
    from tp_transformers.trainer import Trainer

    arguments = arguments_of(str(tmp_path), accelerator_config={"dispatch_batches": True})
    with pytest.raises(tp_transformers.TensorParallelError, match="got dispatch_batches=True with a tensor"):
        Trainer(load(folder), arguments)


@pytest.mark.slow  # workers import torch
@on_ranks()
def test_workers_of_one_copy_draw_alike(folder, tmp_path) -> None:
    """An epoch of random rows, drawn in two worker processes."""
    from tp_transformers.trainer import Trainer

    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        arguments = arguments_of(str(tmp_path), dataloader_num_workers=2)
        run = Trainer(load(folder), arguments, train_dataset=RandomRows(), data_collator=padded)
        assert ranks_agree(*(batch["input_ids"] for batch in run.get_train_dataloader()))
