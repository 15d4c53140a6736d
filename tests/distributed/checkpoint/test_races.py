"""A save of several ranks beside one that is going on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import load
from tests.support.pool import Pool
from tests.support.saving import KINDS, Saved, made, saves, weights_are
from tp_transformers.checkpoint.saving.folder import SaveFolder

pytestmark = pytest.mark.distributed


def save(kind: str, source: Path, folder: Path) -> None:
    KINDS[kind](Saved(load(source), source), folder)


@pytest.mark.parametrize("kind", saves(["some files", "a file a rank"]))
def test_a_save_beside_another_is_one_error_on_all_ranks(pool: Pool, tmp_path: Path, kind: str) -> None:
    old, new, folder = made(tmp_path / "old", 1), made(tmp_path / "new", 2), tmp_path / "folder"
    KINDS[kind](old, folder)
    with SaveFolder(folder):
        assert "another save that is going on" in pool.error(2, save, kind, new.folder, folder)
    assert weights_are(folder, old)
    pool.run(2, save, kind, new.folder, folder)
    assert weights_are(folder, new)
