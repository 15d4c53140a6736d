"""Manifests of pre-sharded checkpoints: any cut read back by any other, manifests that lie, files at odds with one."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.unit.checkpoint.test_writer import full_disk
from tests.unit.slices.test_layout import splits
from tp_transformers import CheckpointError
from tp_transformers.checkpoint import verify_sharded
from tp_transformers.checkpoint.saving.folder import SaveFolder
from tp_transformers.features.presharded.checkpoint import ShardedCheckpoint
from tp_transformers.features.presharded.manifest import MANIFEST_NAME, Manifest, ManifestTensor, RankFile
from tp_transformers.features.presharded.save import SummedWriter
from tp_transformers.slices.layout import Layout, Ranks, Split, packed
from tp_transformers.slices.stored import Stored
from tp_transformers.strategies import take

SAVE = "0123abcd"


def write(folder: Path, tensors: dict[str, tuple[torch.Tensor, Layout | None]], size: int) -> Manifest:
    """What `size` ranks would save of whole `tensors` that are cut by their layouts."""
    files = []
    for rank in range(size):
        local = {name: take(whole, layout, rank) for name, (whole, layout) in tensors.items()}
        name = f"rank-{rank:05}-of-{size:05}-{SAVE}.safetensors"
        writer = SummedWriter(folder / name, local, metadata={"save": SAVE, "rank": str(rank)})
        writer.write_all(local.__getitem__)
        files.append(RankFile(name, writer.size, f"{writer.crc32:08x}"))
        for key, tensor in load_file(folder / name).items():
            assert torch.equal(tensor, local[key])
    whole = {name: ManifestTensor(t.dtype, tuple(t.shape), layout) for name, (t, layout) in tensors.items()}
    Manifest(folder, SAVE, tuple(files), whole, (), "float32", {}, {}).write(folder)
    return Manifest.find(folder)


@settings(max_examples=60)
@given(splits(), st.integers(0, 1), st.data())
def test_any_cut_is_read_back_by_any_other(saved, dim, data) -> None:
    shape = [3, 3]
    shape[dim] = saved.length
    whole = torch.arange(3 * saved.length).view(shape)
    tensors = {"cut": (whole, Layout(dim, saved)), "whole": (torch.randn(2), None)}
    with tempfile.TemporaryDirectory() as folder:
        manifest = write(Path(folder), tensors, saved.size)
        reader = data.draw(st.integers(0, saved.size + 3))
        with ShardedCheckpoint(manifest, rank=reader) as opened:
            assert torch.equal(opened.tensors["cut"].materialize(), whole)
            assert torch.equal(opened.tensors["whole"].materialize(), tensors["whole"][0])
            to, size, parts = (data.draw(st.integers(*bounds)) for bounds in ((0, 1), (1, 5), (1, 3)))
            length, rest = divmod(shape[to], parts)
            cut = Layout(to, packed([Ranks(size).split(length)] * parts + [Ranks(size).split(rest)]))
            for rank in range(size):
                part = take(opened.tensors["cut"], cut, rank)
                assert torch.equal(part.materialize(), take(whole, cut, rank))
        if reader < saved.size:
            with ShardedCheckpoint(manifest, rank=reader) as opened:
                own = take(opened.tensors["cut"], Layout(dim, saved), reader)
                assert isinstance(own, Stored)
                assert tuple(own.shape) == own.stored_shape
                opened.tensors["whole"].materialize()
                assert [Path(source.name).name for source in opened.sources] == [manifest.files[reader].name]


CUT = Layout(0, Split(3, (((0, 2),), ((2, 3),))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {"a": (torch.randn(3, 2), CUT), "b": (torch.randn(4).half(), None)}, 2)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / MANIFEST_NAME).read_text())
    change(content)
    (folder / MANIFEST_NAME).write_text(json.dumps(content))


def escape(content: dict[str, Any]) -> None:
    content["files"][1]["name"] = content["weight_map"]["rank 1"] = "../stolen.safetensors"


def twice(content: dict[str, Any]) -> None:
    content["files"][1] = content["files"][0]
    content["weight_map"]["rank 1"] = content["weight_map"]["rank 0"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(version=2), "got version 2, expected version 1"),
        (lambda c: c.pop("version"), "None for version"),
        (lambda c: c.update(files={}), "for files, expected a list"),
        (lambda c: c.update(files=[], weight_map={}), "one file a rank"),
        (lambda c: c.update(files=[7, 8]), "the file None"),
        (escape, "got the file '../stolen.safetensors', expected rank-<rank>-of-<size>-<save>.safetensors in the same"),
        (twice, "one file a rank"),
        (lambda c: c["files"][0].update(size=-1), "size -1"),
        (lambda c: c["files"][0].update(crc32=5), "checksum 5"),
        (lambda c: c["weight_map"].update({"rank 1": "/etc/passwd"}), "the weight_map"),
        (lambda c: c["layouts"][0].update(dim="0"), "a dim, and the ranges that each of 2 ranks holds"),
        (lambda c: c["layouts"][0].update(dim=2), "layout 0 for a of shape [3, 2]"),
        (lambda c: c["layouts"][0].update(dim=1), "layout 0 for a of shape [3, 2]"),
        (lambda c: c["layouts"][0].update(ranges=[[[0, 3]]]), "that each of 2 ranks holds"),
        (lambda c: c["layouts"][0].update(ranges=[[[0, 2]], [[3, 2]]]), "that each of 2 ranks holds"),
        (lambda c: c["layouts"][0].update(ranges=[[[0, 2]], [[-1, 3]]]), "that each of 2 ranks holds"),
        (lambda c: c["layouts"][0].update(ranges=[[[0, 2]], [[1, 3]]]), "leave nothing out and do not overlap"),
        (lambda c: c["layouts"][0].update(ranges=[[[0, 1]], [[2, 3]]]), "leave nothing out and do not overlap"),
        (lambda c: c["layouts"][0].update(ranges=[[[0, 2]], [[2, 4]]]), "layout 0 for a of shape [3, 2]"),
        (lambda c: c["layouts"].append(None), "the layout None"),
        (lambda c: c["tensors"].update(a=["F32", [3, 2]]), "dtype None for a"),
        (lambda c: c["tensors"].update(a=["F7", [3, 2], 0]), "dtype 'F7' for a"),
        (lambda c: c["tensors"].update(a=["F32", [3, -2], 0]), "shape [3, -2] for a"),
        (lambda c: c["tensors"].update(b=["F16", [0, 1 << 63], None]), "shape [0, 9223372036854775808] for b"),
        (lambda c: c["tensors"].update(a=["F32", [3, 2], 1]), "layout 1 for a"),
        (lambda c: c["tensors"].update(a=["F32", [3, 2], True]), "layout True for a"),
        (lambda c: c.update(conversions="all"), "for conversions"),
        (lambda c: c.update(save="x" * 5000), "expected 8 hexadecimal digits"),
    ],
)
def test_manifests_that_lie_are_refused(folder, change, says) -> None:
    edit(folder, change)
    with pytest.raises(CheckpointError, match=r"sharded\.json") as caught:
        Manifest.find(folder)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", [b"{not json", b"\xff\xfe", b"[" * 100_000, b"[1]", b"null"])
def test_manifests_that_are_no_manifests_are_refused(folder, text) -> None:
    (folder / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"sharded\.json"):
        Manifest.find(folder)


ANOTHER = "got save '76543210'"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: None, "got no such file"),
        (lambda data: data[:-1], "bytes, expected"),
        (lambda data: data.replace(SAVE.encode(), b"76543210"), f"{ANOTHER} in its metadata, expected save '{SAVE}'"),
        (lambda data: data.replace(b'"rank":"1"', b'"rank":"0"'), "got rank '0' in its metadata"),
        (lambda data: data.replace(b"[1,2]", b"[2,1]"), "(2, 1)) for a, expected (torch.float32, (1, 2))"),
        (lambda data: data.replace(b'"a"', b'"c"'), "None for a"),
    ],
)
def test_files_at_odds_with_the_manifest_are_refused(folder, damage, says) -> None:
    manifest = Manifest.find(folder)
    file = folder / manifest.files[1].name
    data = damage(file.read_bytes())
    file.unlink() if data is None else file.write_bytes(data)
    with ShardedCheckpoint(manifest, rank=0) as opened:
        opened.shards(0)
        with pytest.raises(CheckpointError, match=manifest.files[1].name) as caught:
            opened.shards(1)
    assert says in str(caught.value)
    with pytest.raises(CheckpointError, match=manifest.files[1].name) as caught:
        verify_sharded(folder)
    assert "1 fault:" in str(caught.value)


def test_checksums_name_every_file_that_changed(folder) -> None:
    verify_sharded(folder)
    files = sorted(folder.glob("rank-*"))
    for file in files:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with pytest.raises(CheckpointError, match="2 faults") as caught:
        verify_sharded(folder)
    assert all(file.name in str(caught.value) for file in files)
    with pytest.raises(CheckpointError, match=MANIFEST_NAME):
        verify_sharded(folder / "nowhere")


def test_a_full_disk_leaves_no_part_of_a_manifest(tmp_path) -> None:
    manifest = Manifest(tmp_path, "0123abcd", (), {}, (), "float32", {}, {"model": "colwise"})
    with (
        SaveFolder(tmp_path) as place,
        full_disk(),
        pytest.raises(CheckpointError, match=r"sharded\.json: got File too large"),
    ):
        manifest.write(place.staging)
    assert [*tmp_path.iterdir()] == []
