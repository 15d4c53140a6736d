"""Saves of several jobs into one folder at the same time, and loads beside them. A job is a fork with its own model."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.saving import KINDS, Saved, config_is, leftovers, loaded, saves, weights_are
from tp_transformers import CheckpointError

TRIALS = int(os.environ.get("RACES", "20"))
LIMIT = 120
"""Seconds after which a fork ends, also where the test has ended before."""


def together(jobs: Sequence[Callable[[], object]]) -> list[str]:
    """Run jobs in forks that begin at once; "saved", "told" of an error, or "failed" by any other, of each."""
    begin = time.monotonic() + 0.05
    children = []
    for job in jobs:
        child = os.fork()
        if not child:
            signal.alarm(LIMIT)
            time.sleep(max(0.0, begin - time.monotonic()))
            try:
                job()
            except CheckpointError:
                os._exit(1)
            except BaseException:
                os._exit(2)
            os._exit(0)
        children.append(child)
    return [("saved", "told", "failed")[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] for child in children]


def after(delay: float, save: Callable[[Saved, Path], object], saved: Saved, folder: Path) -> Callable[[], None]:
    def job() -> None:
        time.sleep(delay)
        save(saved, folder)

    return job


@pytest.mark.slow
@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new folder", "over another"])
@pytest.mark.parametrize("jobs", [2, 3])
@pytest.mark.parametrize("kind", saves(["one file", "some files", "a file a rank"]))
def test_saves_at_the_same_time(models, tmp_path, monkeypatch, kind, jobs, is_new, locks) -> None:
    """The folder is one job's at the end, and that job was told so; without locks too, but for configs."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    draw, counts = random.Random(f"{kind} {jobs} {is_new}"), Counter[str]()
    for trial in range(TRIALS):
        folder = tmp_path / f"{trial}"
        if not is_new:
            KINDS[kind](models[0], folder)
        delays = [draw.uniform(0, 0.03) for _ in range(jobs)]
        ends = together([after(delay, KINDS[kind], models[job], folder) for job, delay in enumerate(delays)])
        counts.update(ends)
        assert "failed" not in ends
        if locks:
            assert "saved" in ends
        winners = [job for job in range(jobs) if weights_are(folder, models[job])]
        assert len(winners) == 1, (trial, ends)
        if locks:
            assert ends[winners[0]] == "saved"
            assert config_is(folder, models[winners[0]])
            assert not leftovers(folder)
    print(f"{kind}, {jobs} jobs, {'new' if is_new else 'over'}, {'locks' if locks else 'no locks'}: {dict(counts)}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", saves(["one file", "some files", "a file a rank"]))
def test_loads_beside_saves(models, tmp_path, kind) -> None:
    """A load takes one of the models, or raises one error that names the folder."""
    KINDS[kind](models[0], tmp_path)
    child = os.fork()
    if not child:
        signal.alarm(LIMIT)
        draw = random.Random(1)
        while True:
            for saved in models:
                KINDS[kind](saved, tmp_path)
                time.sleep(draw.uniform(0, 0.05))
    counts = Counter[str]()
    try:
        for _ in range(60):
            try:
                model = load_strictly(tmp_path)
            except CheckpointError as error:
                names_it = str(tmp_path) in str(error)
                counts["clear error" if names_it else f"other error: {error}"] += 1
                continue
            found = [number for number, saved in enumerate(models) if is_of(model, saved)]
            assert len(found) == 1
            counts["whole"] += 1
            counts["config of another"] += model.config.max_position_embeddings != models[found[0]].mark
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(f"{kind}: {dict(counts)}")
    assert counts["whole"] > 10
    assert not [kind for kind in counts if kind.startswith("other")]
    assert loaded(tmp_path) is not None


def load_strictly(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    import tp_transformers

    with tp_transformers.enable():
        return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")


def is_of(model: Any, saved: Saved) -> bool:
    expected = saved.model.state_dict()
    return all((value == expected[name]).all() for name, value in model.state_dict().items())
