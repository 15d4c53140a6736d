"""Two ranks have the same file: names of contents on the Hub and in its cache, samples of contents elsewhere."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tp_transformers import CheckpointError
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.checkpoint.reading.local_file import LocalFile
from tp_transformers.features.hub_streaming.remote_file import RemoteFile
from tp_transformers.features.machines.sameness import BLOCK_BYTES, BLOCKS, check_same_files, sample
from tp_transformers.ranks.group import TensorParallelGroup
from tp_transformers.slices.stored import Source

ETAG, COMMIT = "e" * 64, "c" * 40


def remote(*, etag: str = ETAG, commit: str = COMMIT, size: int = 8) -> RemoteFile:
    url = f"http://hub/org/model/resolve/{commit}/model.safetensors"
    return RemoteFile(url, name=f"org/model@{commit[:8]}/model.safetensors", size=size, etag=etag, location=url)


def cached(folder: Path, *, etag: str = ETAG, commit: str = COMMIT) -> LocalFile:
    """A file as the Hub's cache holds it: a link by its name to one that the ETag names."""
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / etag).write_bytes(bytes(8))
    (folder / "snapshots" / commit).mkdir(parents=True)
    link = folder / "snapshots" / commit / "model.safetensors"
    link.symlink_to(folder / "blobs" / etag)
    return LocalFile(link)


def check(monkeypatch: pytest.MonkeyPatch, own: Source, other: Source) -> int:
    """What the rank with `own` finds, beside one with `other`."""
    told: list[Any] = []

    def first(self: TensorParallelGroup, function: Callable[[], Any]) -> list[Any]:
        told.append(function())
        return [told[-1]] * 2

    monkeypatch.setattr(TensorParallelGroup, "everywhere", first)
    group = TensorParallelGroup(None, 0, 2, torch.device("cpu"))
    given = [SimpleNamespace(opened=[source], signature=["model.safetensors"]) for source in (other, own)]
    check_same_files(group, given[0])  # type: ignore[arg-type]
    monkeypatch.setattr(TensorParallelGroup, "everywhere", lambda _, function: [function(), told[0]])
    return check_same_files(group, given[1])  # type: ignore[arg-type]


def test_the_same_of_one_commit(monkeypatch, tmp_path) -> None:
    assert check(monkeypatch, remote(), remote()) == 0
    with cached(tmp_path) as here:
        assert check(monkeypatch, here, remote()) == 0
        assert check(monkeypatch, remote(), here) == 0


@pytest.mark.parametrize(
    ("changes", "trait"), [({"etag": "f" * 64}, "etag"), ({"commit": "d" * 40}, "commit"), ({"size": 9}, "size")]
)
def test_others_are_refused(changes, trait, monkeypatch, tmp_path) -> None:
    says = f"got another {trait} on rank 1 .*than on rank 0"
    with pytest.raises(CheckpointError, match=f"^checkpoint file org/model@cccccccc/model.safetensors: {says}"):
        check(monkeypatch, remote(), remote(**changes))
    with cached(tmp_path) as here, pytest.raises(CheckpointError, match=says):
        check(monkeypatch, here, remote(**changes))


@pytest.mark.parametrize("size", [1, BLOCK_BYTES, BLOCK_BYTES + 1, BLOCKS * BLOCK_BYTES, 10 * BLOCKS * BLOCK_BYTES + 7])
def test_samples_are_bounded_and_of_the_first_and_the_last_byte(tmp_path, size) -> None:
    path = tmp_path / "file"
    found = set()
    for changed in (None, 0, size - 1):
        content = bytearray(size)
        if changed is not None:
            content[changed] = 1
        path.write_bytes(content)
        with LocalFile(path) as source:
            digest, nbytes = sample(source)
            found.add(digest)
            assert min(size, BLOCKS * BLOCK_BYTES) <= nbytes <= BLOCKS * BLOCK_BYTES
            assert source.bytes_read == source.reads == 0
    assert len(found) == (2 if size == 1 else 3)


def test_a_header_is_known_once_it_is_read(tmp_path) -> None:
    for name in ("a", "b", "c"):
        save_file({"x" if name != "c" else "y": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    with Checkpoint([tmp_path / "a.safetensors"]) as a, Checkpoint([tmp_path / "b.safetensors"]) as b:
        assert a.sources[0].header_hash == b.sources[0].header_hash
    with Checkpoint([tmp_path / "c.safetensors"]) as c:
        assert c.sources[0].header_hash != a.sources[0].header_hash
