"""Saves of two jobs of 2 ranks each into one folder at the same time. The folder is loaded by one process."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.models import load
from tests.support.pool import Pool
from tests.support.saving import KINDS, Saved, config_is, leftovers, made, weights_are
from tp_transformers import CheckpointError

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TRIALS = int(os.environ.get("RACES", "6"))


@pytest.fixture(scope="module")
def pools(pool: Pool) -> Iterator[tuple[Pool, Pool]]:
    other = Pool()
    yield pool, other
    other.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    return [made(tmp_path_factory.mktemp("model"), seed) for seed in (1, 2, 3)]


def save(kind: str, source: Path, folder: Path, meeting: Path, job: int, delay: float) -> str:
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


@pytest.mark.parametrize(
    "kinds",
    [("a file a rank", "a file a rank"), ("some files", "some files"), ("a file a rank", "some files")],
    ids=" and ".join,
)
def test_two_jobs_save_at_the_same_time(
    pools: tuple[Pool, Pool], models: list[Saved], tmp_path: Path, kinds: tuple[str, str]
) -> None:
    """Ranks of a job agree; the folder is the model of a job that was told so, or the earlier one if none was."""
    draw, counts = random.Random(f"{kinds}"), Counter[tuple[str, ...]]()
    for trial in range(TRIALS):
        folder, meeting = tmp_path / f"{trial}", tmp_path / f"{trial}-meeting"
        meeting.mkdir()
        is_new = trial % 2 == 0
        if not is_new:  # in the form of either job
            KINDS[kinds[trial // 2 % 2]](models[2], folder)
        with ThreadPoolExecutor(2) as threads:
            jobs = [
                threads.submit(
                    pools[job].run, 2, save, kinds[job], models[job].folder, folder, meeting, job, draw.uniform(0, 0.03)
                )
                for job in range(2)
            ]
        ranks = [job.result() for job in jobs]
        assert all(len(set(each)) == 1 for each in ranks), ranks
        ends = [each[0] for each in ranks]
        counts[("new" if is_new else "over another", *ends)] += 1
        # A save that is refused for the form of the earlier one keeps the other out as long as it looks.
        assert "saved" in ends or (not is_new and len(set(kinds)) == 2), (trial, ends)
        winners = [number for number, saved in enumerate(models) if weights_are(folder, saved)]
        assert len(winners) == 1, (trial, ends)
        assert config_is(folder, models[winners[0]])
        assert winners[0] == 2 if "saved" not in ends else winners[0] < 2 and ends[winners[0]] == "saved"
        assert not leftovers(folder)
    print(f"{' and '.join(kinds)}: {dict(counts)}")
