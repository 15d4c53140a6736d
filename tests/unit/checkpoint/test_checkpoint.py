"""Headers that lie, files that end early, and slices that land where they should."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.tiers import wide
from tp_transformers import CheckpointError
from tp_transformers.checkpoint.reading.header import Checkpoint, check_files, read_index
from tp_transformers.checkpoint.reading.jobs import Request
from tp_transformers.checkpoint.reading.local_file import LocalFile
from tp_transformers.checkpoint.reading.reader import read
from tp_transformers.slices.layout import Ranks


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "length", "says"),
    [
        (b"{not json", b"", None, "not JSON"),
        (b"\xff\xfe", b"", None, "not JSON"),
        ([1, 2], b"", None, "JSON list"),
        ({"a": GOOD}, b"1234567", None, "truncated"),
        ({"a": {**GOOD, "data_offsets": [8, 16]}}, b"12345678", None, "ending at byte"),
        ({"a": {**GOOD, "data_offsets": [0, 4]}}, b"12345678", None, "8 bytes for F32"),
        ({"a": {**GOOD, "shape": [3]}}, b"12345678", None, "12 bytes for F32"),
        ({"a": {**GOOD, "shape": [-2]}}, b"12345678", None, "for tensor a"),
        ({"a": {**GOOD, "dtype": "F7"}}, b"12345678", None, "'F7'"),
        ({"a": {"dtype": "F32"}}, b"", None, "for tensor a"),
        ({"a": "nonsense"}, b"", None, "for tensor a"),
        ({}, b"", 1 << 40, "header of 1099511627776 bytes"),
        (b"[" * 200_000, b"", None, "not JSON"),
        ({"a": {**GOOD, "dtype": ["F32"]}}, b"12345678", None, "['F32']"),
        ({"a": {"dtype": "F32", "shape": [0, 1 << 63], "data_offsets": [0, 0]}}, b"", None, "for tensor a"),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, b"123456789012", None, "b and a in the same bytes"),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [12, 20]}}, b"1" * 20, None, "a gap before b"),
        ({"a": {**GOOD, "data_offsets": [4, 12]}}, b"1" * 12, None, "a gap before a"),
        ({"a": GOOD}, b"1" * 9, None, "1 bytes after the last tensor"),
        ({"a": {**GOOD, "data_offsets": [False, 8]}}, b"12345678", None, "for tensor a"),
        (b'{"a": 1, "a": 2}', b"", None, "'a' occurs twice"),
        (b'{"a": NaN}', b"", None, "NaN"),
        (json.dumps({"a": GOOD}).encode("utf-16"), b"12345678", None, "not JSON"),
        ({"a": GOOD, "__metadata__": {"format": 1}}, b"12345678", None, "__metadata__"),
        ({"a": GOOD, "__metadata__": ["pt"]}, b"12345678", None, "__metadata__"),
    ],
)
def test_malformed_headers_are_named(tmp_path, header, data, length, says) -> None:
    path = write(tmp_path / "bad.safetensors", header, data, length=length)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors") as caught:
        Checkpoint([path])
    assert says in str(caught.value)
    assert "expected" in str(caught.value)


def test_a_file_shorter_than_its_length_prefix(tmp_path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="3 bytes"):
        Checkpoint([tmp_path / "a.safetensors"])


def test_one_tensor_in_two_files(tmp_path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="two files"):
        Checkpoint([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


@pytest.mark.parametrize("weight_map", [{"x": "b.safetensors"}, {"y": "a.safetensors"}])
def test_an_index_at_odds_with_the_headers(tmp_path, weight_map) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="index"):
        Checkpoint([tmp_path / "a.safetensors"], weight_map=weight_map)


@pytest.mark.parametrize("file", [None, 3, ""])
def test_an_index_names_a_file_for_every_tensor(tmp_path, file) -> None:
    path, good = tmp_path / "index.json", {"weight_map": {"x": "a.safetensors"}, "metadata": {"total_size": 4}}
    path.write_text(json.dumps(good))
    assert read_index(path) == (good["weight_map"], good["metadata"])
    path.write_text(json.dumps({**good, "weight_map": {"x": "a.safetensors", "y": file}}))
    with pytest.raises(CheckpointError, match="its file for y is"):
        read_index(path)


def test_missing_files_pickles_and_escapes(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        Checkpoint([tmp_path / "gone.safetensors"])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
        check_files([str(tmp_path / "pytorch_model.bin")], folder=tmp_path)
    with pytest.raises(CheckpointError, match="own folder"):
        check_files([str(tmp_path / ".." / "other" / "a.safetensors")], folder=tmp_path)
    with pytest.raises(CheckpointError, match="no weight files"):
        check_files([], folder=tmp_path)


def open_files() -> set[str]:
    return {str(path.resolve()) for path in Path("/proc/self/fd").iterdir() if path.exists()}


def test_files_are_closed_on_every_path(tmp_path) -> None:
    good, bad = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"x": torch.ones(2)}, good)
    bad.write_bytes(b"123")
    with Checkpoint([good]):
        assert str(good) in open_files()
    with pytest.raises(CheckpointError):
        Checkpoint([good, bad])
    assert not {str(good), str(bad)} & open_files()


@pytest.fixture
def stored(tmp_path: Path):
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(7, 5),
        "b": torch.randn(3).bfloat16(),
        "c": torch.randint(-9, 9, (4, 6, 2)).to(torch.int16),
        "d": torch.randn(40, 300).half(),
        "e": torch.randn(9, 31).half(),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    with Checkpoint([path]) as checkpoint:
        yield checkpoint, path


@pytest.mark.parametrize("cast", [None, torch.float64])
def test_slices_land_as_safetensors_own_reader_gives_them(stored, cast, monkeypatch) -> None:
    # A staging buffer smaller than a row, so that casts cross its borders.
    monkeypatch.setattr("tp_transformers.checkpoint.reading.jobs.JOB_BYTES", 64)
    checkpoint, path = stored
    requests, expected = [], []
    with safe_open(path, "pt") as reference:
        for name in reference.keys():  # noqa: SIM118 - not a dict
            whole = reference.get_tensor(name)
            for dim in range(whole.ndim):
                split = Ranks(3).split(whole.shape[dim])
                for rank in range(3):
                    shard = checkpoint.tensors[name].select(dim, split.ranges[rank])
                    requests.append(Request(shard, torch.empty(shard.shape, dtype=cast or shard.dtype)))
                    start, stop = split.ranges[rank][0]
                    expected.append(whole.narrow(dim, start, stop - start).to(cast or whole.dtype))
    seen: list[int] = []
    read(requests, progress=seen.append)
    for request, value in zip(requests, expected, strict=True):
        assert torch.equal(request.destination, value)
    assert sum(seen) == sum(request.tensor.nbytes for request in requests)


@pytest.mark.parametrize(
    ("method", "staging", "cast"),
    wide(
        dict.fromkeys(
            [
                *[("map", 16, None), ("blocks", 16, torch.float64), ("reads", 16, None)],
                *product(["map", "blocks", "reads"], [16, 1 << 20, 64], [None, torch.float64]),
            ]
        ),
        3,
    ),
)
def test_views_of_any_strides_are_filled_and_nothing_beside_them(stored, staging, cast, method, monkeypatch) -> None:
    # 16 bytes are less than a row of any tensor here, and two elements of a cast one.
    if method != "map":
        monkeypatch.setattr(LocalFile, "is_resident", lambda file, spans: False)
    monkeypatch.setattr("tp_transformers.checkpoint.reading.jobs.cheapest", lambda block, may_map: method)
    monkeypatch.setattr("tp_transformers.checkpoint.reading.jobs.BLOCK_BYTES", 100)
    monkeypatch.setattr("tp_transformers.checkpoint.reading.jobs.JOB_BYTES", staging)
    checkpoint, path = stored
    requests, expected, around = [], [], []
    with safe_open(path, "pt") as reference:
        for name in ("a", "c", "e"):
            whole = reference.get_tensor(name)
            tensor = checkpoint.tensors[name]
            for dim in range(whole.ndim):
                length = whole.shape[dim]
                # The middle of a wider tensor; the transposed memory; every second index; and all that of a slice.
                wider = torch.full(
                    [n + 2 * (d == dim) for d, n in enumerate(whole.shape)], 7, dtype=cast or whole.dtype
                )
                crossed = torch.empty(whole.transpose(0, dim).shape, dtype=cast or whole.dtype).transpose(0, dim)
                sparse = torch.empty([2 * n for n in whole.shape], dtype=cast or whole.dtype)[
                    (slice(0, None, 2),) * whole.ndim
                ]
                for destination in (wider.narrow(dim, 1, length), crossed, sparse):
                    requests.append(Request(tensor, destination))
                    expected.append(whole)
                ranges = [(2, length), (0, 1)]
                requests.append(Request(tensor.select(dim, ranges), crossed.clone().narrow(dim, 0, length - 1)))
                expected.append(torch.cat([whole.narrow(dim, 2, length - 2), whole.narrow(dim, 0, 1)], dim))
                around += [wider.select(dim, 0), wider.select(dim, length + 1)]
    before = checkpoint.bytes_read
    seen: list[int] = []
    statistics = read(requests, threads=3, progress=seen.append)
    for request, value in zip(requests, expected, strict=True):
        assert torch.equal(request.destination, value.to(request.destination.dtype))
    assert all((border == 7).all() for border in around)
    assert sum(seen) == sum(request.tensor.nbytes for request in requests)
    assert method in statistics.methods
    assert sum(way.nbytes for way in statistics.methods.values()) == sum(seen)
    assert sum(way.copied for way in statistics.methods.values()) == checkpoint.bytes_read - before
    assert checkpoint.bytes_read - before == sum(seen) or method == "blocks"


def test_staging_is_bounded(stored, monkeypatch) -> None:
    monkeypatch.setattr("tp_transformers.checkpoint.reading.jobs.JOB_BYTES", 1000)
    monkeypatch.setattr(LocalFile, "is_resident", lambda file, spans: False)
    checkpoint, _ = stored
    (source,) = checkpoint.sources
    largest = 0
    read_source = source.read

    def watched(offset: int, buffers: list[memoryview]) -> None:
        nonlocal largest
        largest = max(largest, sum(map(len, buffers)))
        read_source(offset, buffers)

    monkeypatch.setattr(source, "read", watched)
    tensor = checkpoint.tensors["d"]
    statistics = read([Request(tensor, torch.empty(300, 40, dtype=tensor.dtype).t())])
    assert statistics.peak_buffer == 2 * 600
    assert 600 <= largest <= 1000, "a row of 600 bytes at a time"


def test_empty_slices_read_nothing(stored) -> None:
    checkpoint, _ = stored
    before = checkpoint.bytes_read
    for dtype in (torch.float32, torch.float64):
        read([Request(checkpoint.tensors["a"].select(1, [(2, 2)]), torch.empty(7, 0, dtype=dtype))])
    assert checkpoint.bytes_read == before


def test_neighbours_are_read_by_one_call(stored) -> None:
    checkpoint, _ = stored
    (source,) = checkpoint.sources
    before = source.reads, source.bytes_read
    requests = [
        Request(tensor, torch.empty(tensor.shape, dtype=tensor.dtype)) for tensor in checkpoint.tensors.values()
    ]
    read(requests)
    assert source.reads - before[0] == 1
    assert source.bytes_read - before[1] == sum(request.tensor.nbytes for request in requests)


def test_partial_reads_are_continued(tmp_path, monkeypatch) -> None:
    import os

    (tmp_path / "file").write_bytes(bytes(range(100)))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    buffers = [bytearray(30), bytearray(0), bytearray(11)]
    with LocalFile(tmp_path / "file") as source:
        source.read(5, [memoryview(buffer) for buffer in buffers])
    assert bytes(buffers[0] + buffers[2]) == bytes(range(5, 46))


def test_a_file_that_shrinks_while_it_is_read(stored) -> None:
    checkpoint, path = stored
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)
    last = max(checkpoint.tensors.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(CheckpointError, match=r"truncated|end of the file"):
        read([Request(last, torch.empty(last.shape, dtype=last.dtype))])
