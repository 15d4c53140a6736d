"""Pre-sharded checkpoints, read back on any number of ranks.

A parameter is the lazy concatenation of its shards in the rank files. Selecting a slice selects from the shards: at the
saved layout, a rank's slice is exactly the tensor in its own file, and the load is one read from the first tensor to
the last; at any other layout, a rank reads those ranges of the files that it keeps.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.conversion.convert import identity
from ...checkpoint.reading.header import Checkpoint, read_header
from ...checkpoint.reading.local_file import LocalFile
from ...errors import CheckpointError, list_faults
from ...loading.storage import Asked, Storage
from ...ranks.limits import visible_cores
from ...slices.composed import concat
from ...slices.layout import Range, ShardRange, overlaps
from ...slices.lazy import LazyTensor, ReadStep
from ...slices.stored import Source, Stored
from ...transformers_api import LoadStateDictConfig
from .manifest import MANIFEST_NAME, VARIANT, Manifest, ManifestTensor, RankFile, ordinary_weights

_CHUNK = 16 << 20
"""Bytes per read while a checksum is computed."""


def verify_sharded(folder: str | os.PathLike[str]) -> None:
    """Read every file of a pre-sharded checkpoint and compare its size and checksum to the manifest.

    Loads check sizes and headers only, since a checksum takes a pass over the complete file.

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
    with ThreadPoolExecutor(min(len(manifest.files), visible_cores())) as pool:
        faults = [fault for fault in pool.map(lambda file: _fault(manifest.folder, file), manifest.files) if fault]
    if faults:
        raise CheckpointError(list_faults(f"checkpoint {folder} is not what was saved", faults))


class ShardedCheckpoint(Checkpoint):
    """The full tensors of a pre-sharded checkpoint, as lazy expressions over rank files that are opened when needed.

    At the saved layout a rank opens only its own file.
    """

    def __init__(self, manifest: Manifest, *, rank: int) -> None:
        """Build the expressions for reader `rank` (of any world size), which uses its own file first. Opens no file."""
        self.manifest = manifest
        self.sources: list[Source] = []
        self._files: list[LocalFile | None] = [None] * len(manifest.files)
        self._shards: dict[int, dict[str, Stored]] = {}
        self.home = rank % len(manifest.files)
        """The rank from whose file replicated tensors are read."""
        layouts = {tensor.layout for tensor in manifest.tensors.values() if tensor.layout is not None}
        covers = {layout: layout.split.cover(rank) for layout in layouts}
        self.tensors = {
            name: _FullTensor(self, name, tensor, covers[tensor.layout] if tensor.layout is not None else ())
            for name, tensor in manifest.tensors.items()
        }

    def shards(self, rank: int) -> dict[str, Stored]:
        """Return the tensors in the file of `rank`.

        Raises CheckpointError if the file is missing, or its size or header differs from the manifest.
        """
        if rank not in self._shards:
            source = _open(self.manifest.folder, self.manifest.files[rank])
            self.sources.append(source)
            self._files[rank] = source
            self._shards[rank] = _checked_header(source, self.manifest, rank)
        return self._shards[rank]

    @property
    def opened(self) -> Sequence[Source | None]:
        """The files by rank; None for a file that this rank has not opened."""
        return self._files

    @property
    def signature(self) -> object:
        """Unique name of the save, and its files."""
        return self.manifest.save_id, self.manifest.files


class _FullTensor(LazyTensor):
    """A full tensor read from the rank files; a selection opens only the files that it needs."""

    def __init__(
        self, checkpoint: ShardedCheckpoint, name: str, tensor: ManifestTensor, cover: tuple[ShardRange, ...]
    ) -> None:
        """`cover` maps each range to a file."""
        self.checkpoint, self.name, self.cover, self.home = checkpoint, name, cover, checkpoint.home
        self.sharded_dim = None if tensor.layout is None else tensor.layout.dim
        self.shape, self.dtype = torch.Size(tensor.shape), tensor.dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> LazyTensor:
        """Select the ranges from the shards; along a dim that is not sharded, the same ranges from every shard."""
        if self.sharded_dim is None:
            return self._shard(self.home).select(dim, ranges)
        if dim != self.sharded_dim:
            return self._all().select(dim, ranges)
        selected: list[LazyTensor] = []
        for part, start, stop in overlaps([entry.length for entry in self.cover], ranges):
            entry = self.cover[part]
            selected.append(self._shard(entry.rank).select(dim, [(entry.local + start, entry.local + stop)]))
        return concat(selected, dim) if selected else self._shard(self.home).select(dim, [])

    def read_steps(self, destination: torch.Tensor) -> Iterator[tuple[ReadStep, torch.Tensor]]:
        yield from self._all().read_steps(destination)

    def _all(self) -> LazyTensor:
        if self.sharded_dim is None:
            return self._shard(self.home)
        return self.select(self.sharded_dim, [(0, self.shape[self.sharded_dim])])

    def _shard(self, rank: int) -> Stored:
        return self.checkpoint.shards(rank)[self.name]


def _open(folder: Path, file: RankFile) -> LocalFile:
    path = folder / file.name
    if not path.is_file():
        raise CheckpointError(
            f"checkpoint file {path}",
            got="no such file",
            expected=f"the file of {file.size} bytes that was saved",
            fix="If it was saved on machines that share no folder, copy the rank files of all of them into this one. "
            "Otherwise the folder was copied in part: copy it again.",
        )
    source = LocalFile(path)
    if source.size != file.size:
        source.close()
        raise _changed(path, got=f"{source.size} bytes", expected=f"{file.size}, as they were saved")
    return source


def _checked_header(source: Source, manifest: Manifest, rank: int) -> dict[str, Stored]:
    """Read the tensors in the file of `rank`. Raises CheckpointError if they differ from the manifest."""
    header = read_header(source)
    for key, value in {"save": manifest.save_id, "rank": str(rank)}.items():
        if (found := source.metadata.get(key)) != value:
            fix = "The file is another one than was written here."
            raise source.fault(f"{key} {found!r} in its metadata", f"{key} {value!r}", fix)
    actual = {name: (stored.dtype, tuple(stored.shape)) for name, stored in header.items()}
    expected = {name: (tensor.dtype, tensor.local_shape(rank)) for name, tensor in manifest.tensors.items()}
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            raise _changed(source.name, got=f"{actual.get(name)} for {name}", expected=f"{expected.get(name)}")
    return header


def _fault(folder: Path, file: RankFile) -> str | None:
    """Describe the fault of one file; None if its size and checksum equal those in the manifest."""
    try:
        with _open(folder, file) as source:
            buffer, crc32 = memoryview(bytearray(min(_CHUNK, max(source.size, 1)))), 0
            for start in range(0, source.size, len(buffer)):
                chunk = buffer[: min(len(buffer), source.size - start)]
                source.read(start, [chunk])
                crc32 = zlib.crc32(chunk, crc32)
    except CheckpointError as error:
        return str(error)
    return None if f"{crc32:08x}" == file.crc32 else f"{file.name}: got checksum {crc32:08x}, expected {file.crc32}"


def _changed(path: str | Path, *, got: str, expected: str) -> CheckpointError:
    fix = "The folder was copied in part or changed; copy all of it again, or save the model again."
    return CheckpointError(f"checkpoint file {path}", got=got, expected=expected, fix=fix)


class RankFiles(Storage):
    """The rank files of one manifest; a rank opens those that it reads."""

    has_own_names = True

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.shares = manifest.shares

    @classmethod
    def find(cls, asked: Asked) -> Storage | None:
        if asked.folder is None or asked.arguments.get("variant") not in (None, VARIANT):
            return None
        manifest = Manifest.find(asked.folder)
        if manifest is None:
            return None
        asked.arguments["variant"] = VARIANT
        return cls(manifest)

    @classmethod
    def check_unplanned(cls, asked: Asked) -> None:
        folder = asked.folder
        if folder is None or asked.arguments.get("variant") not in (None, VARIANT) or ordinary_weights(folder):
            return
        if (folder / MANIFEST_NAME).is_file():
            raise CheckpointError(
                f"checkpoint {folder}",
                got="a pre-sharded checkpoint without tp_plan",
                expected="tp_plan, on any number of ranks",
                fix='Pass tp_plan="auto", or the plan of your own that it was sharded with; save_pretrained of that '
                "model writes an ordinary checkpoint.",
            )

    def open(self, files: Sequence[str], config: LoadStateDictConfig, *, rank: int) -> Checkpoint:
        return ShardedCheckpoint(self.manifest, rank=rank)

    def applied(self, entries: Sequence[Any]) -> Sequence[Any]:
        """Conversions of the load before the model was saved in shards; `save_pretrained` reverts them."""
        return [entry for entry in entries if identity(entry) in self.manifest.conversions]

    def origin(self, name: str, files: Sequence[str]) -> Mapping[str, Any]:
        return self.manifest.source
