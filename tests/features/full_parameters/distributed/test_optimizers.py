"""Steps of every optimizer on a model that is cut: those of one process, or refused."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

from tests.support.comparisons import relative
from tests.support.needs import needs
from tests.support.optimizers import (
    Comparison,
    of_norms,
    of_torch,
    of_trainer,
    outcome,
    torch_optimizers,
    trainer_optimizers,
)
from tests.support.tiers import wide
from tests.support.training import quietly

# With the same gradients, the arithmetic of an element or of a gathered matrix is the same to the last bit.
TOLERANCE = 1e-6
# States in 8 or 4 bits are quantised in blocks of a rank's own elements, which even changes signs of single elements of
# an update: the norm of what differs is compared with the update's. AdamW of torchao in one process, on halves of
# matrices instead of whole ones, differs by 0.01 with 8 bits and by 0.19 with 4; Lion with 8 bits by 0.06.
QUANTISED = {"8bit": 0.1, "4bit": 0.3}

# What `make optimizers` does not install: for other devices, and a package that no registry has.
NOWHERE = ("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision")


def torch_rows(folder: str) -> dict[str, Any]:
    """Run on every rank: the error of every optimizer of torch, or its text."""
    comparison = Comparison(folder)
    return {name: outcome(partial(comparison.of, partial(of_torch, name))) for name in torch_optimizers()}


@quietly()
def trainer_rows(folder: str) -> dict[str, Any]:
    """Run on every rank: the same for every value of Trainer's `optim`."""
    comparison = Comparison(folder)
    return {
        name: outcome(
            partial(comparison.of, partial(of_trainer, name), difference=of_norms if quantised(name) else relative)
        )
        for name in trainer_optimizers()
    }


def quantised(name: str) -> float:
    """How far off the updates of an optimizer may be whose states are quantised; 0.0 for all others."""
    return next((tolerance for bits, tolerance in QUANTISED.items() if bits in name), 0.0)


def judged(name: str, row: float | str) -> str:
    """Right, refused in our words, not installed, or as in one process; else the row itself, which is wrong."""
    if isinstance(row, float):
        if TOLERANCE <= row < quantised(name):
            return f"right up to the quantiser, {row:.1g} of the norm"
        return "right" if row < TOLERANCE else f"WRONG, an error of {row:.2g}"
    if row.startswith("UnsupportedError"):
        return f"refused: {row}"
    if not row.startswith("alone, "):
        return f"WRONG, {row}"
    is_missing = any(words in row.lower() for words in ("install", "failed to import"))
    return row.replace("alone, ", "not installed: " if is_missing else "as one process: ", 1)


@needs("trainer")
@pytest.mark.parametrize(
    ("rows", "heads"),
    wide([(trainer_rows, (9, 3)), (torch_rows, (9, 3)), (trainer_rows, (8, 4)), (torch_rows, (8, 4))], 1),
)
def test_every_optimizer_is_right_or_refused(pool, cases, rows, heads) -> None:
    ranks = pool.run(2, rows, cases(*heads, num_hidden_layers=1).folder, timeout=600)  # torchao's are compiled
    judgements = {name: judged(name, row) for name, row in ranks[0].items()}
    print(f"\n{heads[0]} query and {heads[1]} KV heads on 2 ranks")
    for name, judgement in judgements.items():
        print(f"  {name:30} {judgement[:200]}")
    for rank in ranks:
        wrong = {name: row for name, row in rank.items() if judged(name, row).startswith("WRONG")}
        assert not wrong
    missing = [name for name, judgement in judgements.items() if judgement.startswith("not installed")]
    print(f"  {len(judgements) - len(missing)} of {len(judgements)} compared, {len(missing)} not installed")
    assert sum(judgement.startswith("right") for judgement in judgements.values()) > 3
    assert not os.environ.get("OPTIMIZERS") or set(missing) <= set(NOWHERE)
