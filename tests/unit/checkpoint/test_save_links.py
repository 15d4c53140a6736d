"""Symbolic links in a folder are replaced by a save, and not written through."""

from __future__ import annotations

import pytest

from tests.support.saving import KINDS, MANIFEST_NAME, saves, weights_are
from tp_transformers import CheckpointError


@pytest.mark.parametrize("kind", saves(["one file", "some files", "a file a rank"]))
def test_links_to_the_files_of_another_checkpoint(models, tmp_path, kind) -> None:
    old, new, _ = models
    other, folder = tmp_path / "other", tmp_path / "folder"
    KINDS[kind](old, other)
    folder.mkdir()
    for path in other.iterdir():
        (folder / path.name).symlink_to(path)
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in other.iterdir()}
    KINDS[kind](new, folder)
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in other.iterdir()} == before
    assert weights_are(other, old)
    assert weights_are(folder, new)
    assert not [path.name for path in folder.iterdir() if path.is_symlink()]


@pytest.mark.parametrize("kind", saves(["one file", "some files", "a file a rank"]))
@pytest.mark.parametrize("leads", ["nowhere", "to a file"])
def test_links_of_names_that_a_save_uses(models, tmp_path, kind, leads) -> None:
    target, folder = tmp_path / "target", tmp_path / "folder"
    folder.mkdir()
    if leads == "to a file":
        target.write_text("another's")
    KINDS[kind](models[0], tmp_path / "plain")
    names = {path.name for path in (tmp_path / "plain").iterdir() if not path.name.startswith("rank-")}
    if kind == "a file a rank":
        names -= {MANIFEST_NAME}
    for name in names | {f"{name}.partial" for name in [*names, MANIFEST_NAME]}:
        (folder / name).symlink_to(target)
    KINDS[kind](models[0], folder)
    assert weights_are(folder, models[0])
    assert (target.read_text() == "another's") if leads == "to a file" else not target.exists()
    assert not [name for name in names if (folder / name).is_symlink()]


def test_a_folder_that_is_a_link_is_the_one_that_it_leads_to(models, tmp_path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    KINDS["one file"](models[0], tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert weights_are(tmp_path / "disk", models[0])


@pytest.mark.parametrize("kind", saves(["one file", "a file a rank"]))
def test_a_folder_that_is_a_link_that_leads_nowhere(models, tmp_path, kind) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "none")
    with pytest.raises(CheckpointError, match="link: got a symbolic link that leads nowhere"):
        KINDS[kind](models[0], tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_in_the_place_of_a_file(models, tmp_path, name) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"{name}: got Is a directory"):
        KINDS["one file"](models[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
