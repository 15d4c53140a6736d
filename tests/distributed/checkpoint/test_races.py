"""A save of several ranks beside one that is going on, and saves of two jobs of 2 ranks each at the same time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.models import load
from tests.support.pool import Pool
from tests.support.saving import KINDS, Saved, config_is, leftovers, made, saves, weights_are
from tp_transformers import CheckpointError
from tp_transformers.checkpoint.saving.folder import SaveFolder

TRIALS = 6


def save(kind: str, source: Path, folder: Path) -> None:
    KINDS[kind](Saved(load(source), source), folder)


@pytest.mark.parametrize("kind", saves(["some files", "a file a rank"]))
def test_a_save_beside_another_is_one_error_on_all_ranks(pool, tmp_path, kind) -> None:
    old, new, folder = made(tmp_path / "old", 1), made(tmp_path / "new", 2), tmp_path / "folder"
    KINDS[kind](old, folder)
    with SaveFolder(folder):
        assert "another save that is going on" in pool.error(2, save, kind, new.folder, folder)
    assert weights_are(folder, old)
    pool.run(2, save, kind, new.folder, folder)
    assert weights_are(folder, new)


@pytest.fixture
def pools(pool: Pool) -> Iterator[tuple[Pool, Pool]]:
    other = Pool()
    yield pool, other
    other.close()


def save_beside(kind: str, source: Path, folder: Path, meeting: Path, job: int, delay: float) -> str:
    """Runs on every rank: load, wait for the other job, and save; "saved", or "told" of an error."""
    saved = Saved(load(str(source)), source)
    if dist.get_rank() == 0:
        (meeting / f"{job}").touch()
        end = time.monotonic() + 60
        while not (meeting / f"{1 - job}").exists():
            assert time.monotonic() < end, "the other job does not come"
            time.sleep(0.001)
        time.sleep(delay)
    try:
        KINDS[kind](saved, folder)
    except CheckpointError:
        return "told"
    return "saved"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), saves([("a file a rank",) * 2, ("some files",) * 2, ("a file a rank", "some files")])
)
def test_two_jobs_save_at_the_same_time(pools, tmp_path, first, second) -> None:
    """Ranks of a job agree; the folder is the model of a job that was told so, or the earlier one if none was."""
    kinds = first, second
    draw, models = random.Random(f"{kinds}"), [made(tmp_path / f"model-{seed}", seed) for seed in (1, 2, 3)]
    for trial in range(TRIALS):
        folder, meeting, is_new = tmp_path / f"{trial}", tmp_path / f"{trial}-meeting", trial % 2 == 0
        meeting.mkdir()
        if not is_new:  # in the form of either job
            KINDS[kinds[trial // 2 % 2]](models[2], folder)
        with ThreadPoolExecutor(2) as threads:
            jobs = [
                threads.submit(each.run, 2, save_beside, kind, own.folder, folder, meeting, job, draw.uniform(0, 0.03))
                for job, (each, kind, own) in enumerate(zip(pools, kinds, models[:2], strict=True))
            ]
        ends, others = zip(*(job.result() for job in jobs), strict=True)
        assert ends == others
        # A save that is refused for the form of the earlier one keeps the other out as long as it looks.
        assert "saved" in ends or (not is_new and len(set(kinds)) == 2), (trial, ends)
        winners = [number for number, saved in enumerate(models) if weights_are(folder, saved)]
        assert len(winners) == 1, (trial, ends)
        assert config_is(folder, models[winners[0]])
        assert winners[0] == 2 if "saved" not in ends else winners[0] < 2 and ends[winners[0]] == "saved"
        assert not leftovers(folder)
