"""Pre-sharded checkpoints, read back on any number of ranks.

A parameter is an expression over the rank files, the concatenation of the pieces that its layout names. Slices push
through it: at the layout that was saved, a rank's slice is exactly the tensor in its own file, and the load is one read
from the file's first tensor to its last; at any other layout, it is the parts of the files that the rank keeps.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ...errors import CheckpointError, list_faults
from ...slices.composed import Expression, concat
from ...slices.layout import Layout, Piece, Range
from ...slices.lazy import LazyTensor, Leaf
from ...slices.source import Source
from ...slices.stored import Stored
from ..reading.header import Checkpoint, read_header
from ..reading.local_file import LocalFile
from .manifest import MANIFEST_NAME, Manifest, RankFile, WholeTensor

_CHUNK = 16 << 20
"""Bytes that are read at once to be summed."""


def verify_sharded(folder: str | os.PathLike[str]) -> None:
    """Read every file of a pre-sharded checkpoint, and hold it against the size and checksum in the manifest.

    Loads check sizes and headers alone, since a checksum takes a pass over the whole file.

    Raises CheckpointError naming every file that is missing or has changed.
    """
    manifest = Manifest.find(Path(folder))
    if manifest is None:
        raise CheckpointError(
            f"checkpoint {folder}",
            got=f"no {MANIFEST_NAME}",
            expected="the folder of a save_sharded that was completed",
            fix="Save the model again.",
        )
    with ThreadPoolExecutor(min(len(manifest.files), os.cpu_count() or 1)) as pool:
        faults = [fault for fault in pool.map(lambda file: _fault(manifest.folder, file), manifest.files) if fault]
    if faults:
        raise CheckpointError(list_faults(f"checkpoint {folder} is not what was saved", faults))


class ShardedCheckpoint(Checkpoint):
    """The whole tensors of a pre-sharded checkpoint, as expressions over rank files that are opened when needed.

    At the layout that was saved a rank opens no file but its own, of however many there are.
    """

    def __init__(self, manifest: Manifest, *, rank: int) -> None:
        """Express every tensor as `rank`, which may be one of another size, best reads it. Opens nothing yet."""
        self.manifest = manifest
        self.sources: list[Source] = []
        self._files: list[LocalFile | None] = [None] * len(manifest.files)
        self._shards: dict[int, dict[str, Stored]] = {}
        covers: dict[Layout | None, tuple[Piece, ...]] = {None: ()}
        self.tensors = {}
        for name, tensor in manifest.tensors.items():
            if tensor.layout is not None and tensor.layout not in covers:
                covers[tensor.layout] = tensor.layout.split.cover(rank)
            self.tensors[name] = _Whole(self, name, tensor, covers[tensor.layout], home=rank % len(manifest.files))

    def shards(self, rank: int) -> dict[str, Stored]:
        """Tensors in the file of `rank`.

        Raises CheckpointError where it is missing, or of another size or with another header than the manifest's.
        """
        if rank not in self._shards:
            source = _open(self.manifest.folder, self.manifest.files[rank])
            self.sources.append(source)
            self._files[rank] = source
            self._shards[rank] = _checked_header(source, self.manifest, rank)
        return self._shards[rank]

    @property
    def opened(self) -> Sequence[Source | None]:
        """The files by rank; None for one that is not opened here."""
        return self._files

    @property
    def signature(self) -> object:
        """Name and files of the save, which no other save has."""
        return self.manifest.save, self.manifest.files


class _Whole(Expression):
    """A whole tensor out of the rank files; a selection opens those that it takes something from."""

    def __init__(
        self, checkpoint: ShardedCheckpoint, name: str, tensor: WholeTensor, cover: tuple[Piece, ...], *, home: int
    ) -> None:
        """`cover` says which piece comes from which file; a tensor in all files comes from that of rank `home`."""
        self.checkpoint, self.name, self.cover, self.home = checkpoint, name, cover, home
        self.cut_dim = None if tensor.layout is None else tensor.layout.dim
        self.shape, self.dtype = torch.Size(tensor.shape), tensor.dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> LazyTensor:
        """The ranges of each piece; along another dim than the cut one, the same ranges of every piece."""
        if self.cut_dim is None:
            return self._shard(self.home).select(dim, ranges)
        if dim != self.cut_dim:
            return self._all().select(dim, ranges)
        parts: list[LazyTensor] = []
        for start, stop in ranges:
            for piece in self.cover:
                low, high = max(start - piece.start, 0), min(stop - piece.start, piece.length)
                if low < high:
                    parts.append(self._shard(piece.rank).select(dim, [(piece.local + low, piece.local + high)]))
        return concat(parts, dim) if parts else self._shard(self.home).select(dim, [])

    def pieces(self, destination: torch.Tensor) -> Iterator[tuple[Leaf, torch.Tensor]]:
        yield from self._all().pieces(destination)

    def _all(self) -> LazyTensor:
        if self.cut_dim is None:
            return self._shard(self.home)
        return self.select(self.cut_dim, [(0, self.shape[self.cut_dim])])

    def _shard(self, rank: int) -> Stored:
        return self.checkpoint.shards(rank)[self.name]


def _open(folder: Path, file: RankFile) -> LocalFile:
    path = folder / file.name
    if not path.is_file():
        raise _other(path, got="no such file", expected=f"the file of {file.size} bytes that was saved")
    source = LocalFile(path)
    if source.size != file.size:
        source.close()
        raise _other(path, got=f"{source.size} bytes", expected=f"{file.size}, as they were saved")
    return source


def _checked_header(source: Source, manifest: Manifest, rank: int) -> dict[str, Stored]:
    """The tensors in the file of `rank`, which are those that the manifest names."""
    header = read_header(source, metadata={"save": manifest.save, "rank": str(rank)})
    found = {name: (stored.dtype, tuple(stored.shape)) for name, stored in header.items()}
    expected = {name: (tensor.dtype, tensor.local_shape(rank)) for name, tensor in manifest.tensors.items()}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise _other(source.name, got=f"{found.get(name)} for {name}", expected=f"{expected.get(name)}")
    return header


def _fault(folder: Path, file: RankFile) -> str | None:
    """The fault of one file; None where its size and checksum are those of the manifest."""
    try:
        with _open(folder, file) as source:
            buffer, crc32 = memoryview(bytearray(min(_CHUNK, max(source.size, 1)))), 0
            for start in range(0, source.size, len(buffer)):
                part = buffer[: min(len(buffer), source.size - start)]
                source.read(start, [part])
                crc32 = zlib.crc32(part, crc32)
    except CheckpointError as error:
        return str(error)
    return None if f"{crc32:08x}" == file.crc32 else f"{file.name}: got checksum {crc32:08x}, expected {file.crc32}"


def _other(path: str | Path, *, got: str, expected: str) -> CheckpointError:
    fix = "The folder was copied in part or changed; copy it again as a whole, or save the model again."
    return CheckpointError(f"checkpoint file {path}", got=got, expected=expected, fix=fix)
