"""Pre-sharded checkpoints without ranks: any cut read back by any other, manifests that lie, one process."""

from __future__ import annotations

import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import tp_transformers
from tests.support.models import assert_same_files
from tests.unit.slices.test_layout import splits
from tp_transformers import CheckpointError, UnsupportedError, save_sharded, verify_sharded
from tp_transformers.checkpoint.saving import writer
from tp_transformers.checkpoint.saving.manifest import MANIFEST_NAME, Manifest, RankFile, WholeTensor
from tp_transformers.checkpoint.saving.sharded_checkpoint import ShardedCheckpoint
from tp_transformers.checkpoint.saving.writer import SummedWriter, Writer
from tp_transformers.slices.layout import Layout, Split, even, packed
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
        writer.write_all(local)
        files.append(RankFile(name, writer.size, f"{writer.crc32:08x}"))
        for key, tensor in load_file(folder / name).items():
            assert torch.equal(tensor, local[key])
    whole = {name: WholeTensor(t.dtype, tuple(t.shape), layout) for name, (t, layout) in tensors.items()}
    Manifest(folder, SAVE, tuple(files), whole, (), "float32", {}, {}).write()
    found = Manifest.find(folder)
    assert found is not None
    return found


@settings(max_examples=60)
@given(splits(), st.integers(0, 1), st.data())
def test_any_cut_is_read_back_by_any_other(saved: Split, dim: int, data: st.DataObject) -> None:
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
            cut = Layout(to, packed([even(length, size)] * parts + [even(rest, size)]))
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
    ],
)
def test_manifests_that_lie_are_refused(folder: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    edit(folder, change)
    with pytest.raises(CheckpointError, match=r"sharded\.json") as caught:
        Manifest.find(folder)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", [b"{not json", b"\xff\xfe", b"[" * 100_000, b"[1]", b"null"])
def test_manifests_that_are_no_manifests_are_refused(folder: Path, text: bytes) -> None:
    (folder / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"sharded\.json"):
        Manifest.find(folder)


def damage_missing(file: Path) -> None:
    file.unlink()


def damage_truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def damage_other_save(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(SAVE.encode(), b"76543210"))


def damage_other_rank(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"rank":"1"', b'"rank":"0"'))


def damage_other_shape(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"[1,2]", b"[2,1]"))


def damage_other_name(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"a"', b'"c"'))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_missing, "got no such file"),
        (damage_truncated, "bytes, expected"),
        (damage_other_save, "got save '76543210' in its metadata, expected save '0123abcd'"),
        (damage_other_rank, "got rank '0' in its metadata"),
        (damage_other_shape, "(2, 1)) for a, expected (torch.float32, (1, 2))"),
        (damage_other_name, "None for a"),
    ],
)
def test_files_at_odds_with_the_manifest_are_refused(folder: Path, damage: Callable[[Path], None], says: str) -> None:
    manifest = Manifest.find(folder)
    assert manifest is not None
    damage(folder / manifest.files[1].name)
    with ShardedCheckpoint(manifest, rank=0) as opened:
        opened.shards(0)
        with pytest.raises(CheckpointError, match=manifest.files[1].name) as caught:
            opened.shards(1)
    assert says in str(caught.value)
    with pytest.raises(CheckpointError, match=manifest.files[1].name) as caught:
        verify_sharded(folder)
    assert "1 fault:" in str(caught.value)


def test_checksums_name_every_file_that_changed(folder: Path) -> None:
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


# -- one process


def load(folder: Any, auto: Any = AutoModelForCausalLM, **arguments: Any) -> Any:
    with tp_transformers.enable():
        return auto.from_pretrained(folder, **{"tp_plan": "auto", **arguments})


@pytest.fixture
def saved(cases: Any, tmp_path: Path) -> tuple[str, Path]:
    """A checkpoint, and the same in one shard."""
    folder = cases(9, 3).folder
    save_sharded(load(folder), tmp_path / "sharded")
    return folder, tmp_path / "sharded"


def test_one_process_saves_and_loads(saved: tuple[str, Path], tmp_path: Path) -> None:
    folder, sharded = saved
    model, info = load(sharded, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    plain = LlamaForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    (file,) = sharded.glob("rank-*.safetensors")
    assert model.tp_report.bytes_read == file.stat().st_size
    load(Path(folder).parent, subfolder=Path(folder).name)  # an ordinary one, as ever
    load(sharded.parent, subfolder=sharded.name).save_pretrained(tmp_path / "back", max_shard_size="60KB")
    assert_same_files(folder, str(tmp_path / "back"))


def test_nothing_is_renamed_again(saved: tuple[str, Path], tmp_path: Path) -> None:
    folder, sharded = saved
    model, info = load(
        sharded, key_mapping={"^lm_head": "model.head", "gate_proj": "up_proj"}, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    plain = LlamaForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    model.save_pretrained(tmp_path / "back", max_shard_size="60KB")
    assert_same_files(folder, str(tmp_path / "back"))


def test_dtypes(saved: tuple[str, Path], tmp_path: Path) -> None:
    folder, sharded = saved
    plain = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    cast = load(sharded, dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), cast.parameters(), strict=True))
    save_sharded(cast, tmp_path / "cast")
    edit_config = json.loads((tmp_path / "cast" / "config.json").read_text())
    assert edit_config.pop("dtype") == "bfloat16"
    assert load(tmp_path / "cast", dtype="auto").dtype == torch.bfloat16
    (tmp_path / "cast" / "config.json").write_text(json.dumps(edit_config))
    assert load(tmp_path / "cast", dtype="auto").dtype == torch.bfloat16, "the manifest knows it too"
    assert load(tmp_path / "cast", dtype=torch.float32).dtype == torch.float32


def test_a_base_model_is_loaded_too(saved: tuple[str, Path]) -> None:
    folder, sharded = saved
    base, plain = load(sharded, AutoModel), AutoModel.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), base.parameters(), strict=True))


def test_without_a_plan_there_is_an_error_and_no_model(saved: tuple[str, Path]) -> None:
    _, sharded = saved
    with tp_transformers.enable():
        for auto in (AutoModelForCausalLM, LlamaForCausalLM):
            with pytest.raises(CheckpointError, match=r"pre-sharded checkpoint without tp_plan.*tp_plan=\"auto\""):
                auto.from_pretrained(sharded)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(sharded)


def test_ordinary_weights_beside_sharded_ones_are_refused(saved: tuple[str, Path], tmp_path: Path) -> None:
    folder, sharded = saved
    model = load(sharded)
    with pytest.raises(CheckpointError, match=r"got a folder that holds model\.safetensors\.index\.json"):
        save_sharded(model, folder)
    assert not [*Path(folder).glob("*rank-*")]
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(sharded)
    with pytest.raises(CheckpointError, match=r"both model\.safetensors\.index\.sharded\.json and model\.safetensors"):
        load(sharded)
    with tp_transformers.enable():
        LlamaForCausalLM.from_pretrained(sharded)  # without a plan there is no doubt what is meant


def test_what_transformers_saves_in_pieces_is_refused(saved: tuple[str, Path], tmp_path: Path) -> None:
    original, _ = saved
    shutil.copy(Path(original) / "config.json", tmp_path)
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").touch()
    with tp_transformers.enable():
        with pytest.raises(CheckpointError, match="saved with distributed_checkpoint=True"):
            AutoModelForCausalLM.from_pretrained(tmp_path, tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(original, tp_plan="auto")
    with pytest.raises(UnsupportedError, match="save_sharded"):
        model.save_pretrained(tmp_path / "new", distributed_checkpoint=True)
    assert not (tmp_path / "new").exists()


def test_a_plain_model_is_refused(cases: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM that was loaded without tp_plan"):
        save_sharded(LlamaForCausalLM.from_pretrained(cases(8, 4).folder), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_save_replaces_the_one_before_it(saved: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, sharded = saved
    before = sorted(path.name for path in sharded.iterdir())
    (sharded / f"rank-00007-of-00008-{SAVE}.safetensors.tmp").write_bytes(b"of a save that was killed")
    (sharded / "notes-of-mine.safetensors").write_bytes(b"")
    model = load(sharded)
    with torch.no_grad():
        model.lm_head.weight.zero_()

    def fails(*args: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(SummedWriter, "write", fails)
        with pytest.raises(OSError, match="no space"):
            save_sharded(model, sharded)
    assert load(sharded).lm_head.weight.abs().max() > 0, "what was there is still there"
    save_sharded(model, sharded)
    assert load(sharded).lm_head.weight.abs().max() == 0
    names = sorted(path.name for path in sharded.iterdir())
    assert len(names) == len(before) + 1
    assert "notes-of-mine.safetensors" in names
    assert len([*sharded.glob("rank-*")]) == 1
    verify_sharded(sharded)


def test_the_manifest_says_where_the_model_is_from(saved: tuple[str, Path], tmp_path: Path) -> None:
    folder, sharded = saved
    commit = "5f1" + "0" * 37
    cached = tmp_path / "models--tiny" / "snapshots" / commit  # as the Hub's cache has it
    shutil.copytree(folder, cached)
    save_sharded(load(cached), tmp_path / "from-cache")
    save_sharded(load(tmp_path / "from-cache"), tmp_path / "again")
    for target in ("from-cache", "again"):
        manifest = Manifest.find(tmp_path / target)
        assert manifest is not None
        assert manifest.source == {"name": str(cached), "commit_hash": commit}
    manifest = Manifest.find(sharded)
    assert manifest is not None
    assert manifest.source == {"name": folder, "commit_hash": None}
    assert manifest.dtype == "float32"
    assert manifest.plan["model.layers.*.self_attn.q_proj"] == "colwise"


def test_a_writer_writes_in_order(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    writer = SummedWriter(tmp_path / "a.safetensors", tensors)
    with pytest.raises(RuntimeError, match="written at byte"):
        writer.write("b", tensors["b"])
    writer.close()
    assert not (tmp_path / "a.safetensors").exists()


@pytest.mark.parametrize("kind", [Writer, SummedWriter, None])
def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_after(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        done.append(f"fsync {path.name} of {os.fstat(fd).st_size} bytes" if path.is_file() else f"fsync {path.name}/")
        fsync(fd)

    def renamed(self: Path, target: Path) -> Path:
        done.append(f"rename {self.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    if kind is None:
        writer.write_text(tmp_path / "file", "text")
    else:
        begun = kind(tmp_path / "file", {"a": torch.ones(500)})
        begun.write("a", torch.ones(500))
        begun.finish()
    size = (tmp_path / "file").stat().st_size
    assert done == [f"fsync file.partial of {size} bytes", "rename file.partial", f"fsync {tmp_path.name}/"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@contextmanager
def full_disk() -> Iterator[None]:
    """Within the block files grow no more: only there, since pytest may write its own report to one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    """Whether it is full when the file is laid out, or when what is buffered is written."""
    tensors = {"a": torch.ones(500), "b": torch.ones(500)}
    begun = SummedWriter(tmp_path / "begun.safetensors", tensors)
    begun.write("a", tensors["a"])
    with full_disk():
        begun.close()
        with pytest.raises(OSError, match="File too large"):
            SummedWriter(tmp_path / "new.safetensors", tensors)
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_leaves_no_part_of_a_manifest(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path, SAVE, (), {}, (), "float32", {}, {"model": "colwise"})
    with full_disk(), pytest.raises(OSError, match="File too large"):
        manifest.write()
    assert [*tmp_path.iterdir()] == []
