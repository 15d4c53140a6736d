"""Pre-sharded checkpoints: every rank's shards in a file of its own, and back at any size.

A whole parameter is an expression over the rank files, the concatenation of the pieces that its layout names. Slices
push through it: at the layout that was saved a rank's slice is exactly the tensor in its own file, so that the load is
one read from the file's first tensor to its last; at any other layout it is those parts of the files that it keeps.

What several ranks hold (norms, replicated KV heads) stands in the file of each. A rank's file is then all that the rank
reads, in one go, and takes on the disk what it takes in memory. Stored once, it would be smaller by what the plan
leaves whole, which is little wherever sharding is worth it, and every rank would read scattered pieces of other files.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...errors import CheckpointError, UnsupportedError, describe, list_faults
from ...marks import untyped
from ...slices.composed import Expression, concat
from ...slices.layout import Layout, Piece, Range
from ...slices.lazy import LazyTensor, Leaf
from ...slices.stored import Stored
from ...strategies import layout_of, local_tensor, whole_like
from ..conversion.convert import identity
from ..reading.header import Checkpoint, read_header
from ..reading.source import LocalFile, Source
from .first_copy import by_first_copy
from .manifest import MANIFEST_NAME, RANK_FILE, Manifest, RankFile, WholeTensor, ordinary_weights
from .save import saved_state, write_configs
from .writer import SummedWriter, make_folder, put_in_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...ranks.mesh import TensorParallelGroup

_CHUNK = 16 << 20
"""Bytes that are read at once to be summed."""


def save_sharded(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Write every rank's shards as a file of its own, for `from_pretrained(folder, tp_plan=...)`; on all ranks.

    The folder has to be one that all ranks share. Files are written under names of this save alone, and count once
    the manifest names them, which rank 0 puts in place last: until then an earlier save in the folder stays what it is,
    and a save that fails leaves nothing behind that could be taken for a checkpoint. On a mesh with other axes too, the
    ranks of all copies call it: the first copy writes, the others wait for it and raise what it raises.

    Raises:
        UnsupportedError: for a model that was not loaded with `tp_plan`.
        CheckpointError: where the folder holds ordinary weights, or is not the same on all ranks.
    """
    group: TensorParallelGroup | None = getattr(model, "tp_group", None)
    if group is None:
        raise UnsupportedError(
            describe(
                "save_sharded",
                got=f"a {type(model).__name__} that was loaded without tp_plan",
                expected="a tensor-parallel model",
                fix='Load it with tp_plan="auto", also on one rank; or call model.save_pretrained(folder).',
            )
        )
    if any(getattr(getattr(param, "tp_shard", None), "data_parallel", None) for param in model.parameters()):
        raise UnsupportedError(
            "save_sharded does not write what FSDP has cut once more. Call model.save_pretrained(folder) on all ranks."
        )
    by_first_copy(group, partial(_save, model, Path(folder), group))


def _save(model: PreTrainedModel, folder: Path, group: TensorParallelGroup) -> None:
    """Write the files of one copy, then the manifest."""
    state, save = saved_state(model), group.gather(secrets.token_hex(4))[0]
    path, temporary = rank_paths(folder, save, group.rank, group.size)

    def write() -> RankFile:
        make_folder(folder)
        refuse_ordinary_weights(folder)
        local = {name: local_tensor(tensor) for name, tensor in state.items()}
        with closing(open_writer(temporary, local, save=save, rank=group.rank)) as writer:
            writer.write_all(local)
        put_in_place(temporary, path)
        return RankFile(path.name, writer.size, f"{writer.crc32:08x}")

    def check() -> Manifest:
        manifest = check_save(model, folder, save, files)
        write_configs(model, folder)
        return manifest

    try:
        # 1. Every rank writes its file.
        files = group.gather(group.together(write))
        # 2. Rank 0 looks at all of them as a load would.
        manifest = group.together(lambda: check() if group.rank == 0 else None)
    except BaseException:
        for left in (temporary, path):
            with suppress(OSError):
                left.unlink()
        raise
    # 3. From here on the folder is this save.
    with group.agree():
        if manifest is not None:
            complete_save(manifest)


def rank_paths(folder: Path, save: str, rank: int, size: int) -> tuple[Path, Path]:
    """What the file of a rank is called, and what until it is complete."""
    path = folder / f"rank-{rank:05}-of-{size:05}-{save}.safetensors"
    return path, path.with_suffix(".safetensors.tmp")


def open_writer(path: Path, local: Mapping[str, torch.Tensor], *, save: str, rank: int) -> SummedWriter:
    """A file for what `rank` holds: `local`, of which dtypes and shapes count."""
    return SummedWriter(path, local, metadata={"save": save, "rank": str(rank)})


def check_save(model: PreTrainedModel, folder: Path, save: str, files: Sequence[RankFile]) -> Manifest:
    """The manifest of files that are all written, which are looked at as a load would. Raises CheckpointError."""
    manifest = _describe(model, folder, save, files)
    with ShardedCheckpoint(manifest, rank=0) as written:
        for rank in range(len(files)):
            written.shards(rank)
    return manifest


def complete_save(manifest: Manifest) -> None:
    """Put the manifest in place, and remove what it is in place of."""
    manifest.write()
    _remove_others(manifest.folder, keep={file.name for file in manifest.files})


def verify_sharded(folder: str | os.PathLike[str]) -> None:
    """Read every file of a pre-sharded checkpoint, and hold it against the size and checksum in the manifest.

    Loads check sizes and headers alone, since a checksum takes a pass over the whole file.

    Raises CheckpointError naming every file that is missing or not what was written.
    """
    manifest = Manifest.find(Path(folder))
    if manifest is None:
        raise CheckpointError(
            describe(
                f"checkpoint {folder}",
                got=f"no {MANIFEST_NAME}",
                expected="the folder of a save_sharded that was completed",
                fix="Save the model again.",
            )
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

    def __enter__(self) -> ShardedCheckpoint:
        return self

    def shards(self, rank: int) -> dict[str, Stored]:
        """What the file of `rank` holds.

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
        """What tells one save from another."""
        return self.manifest.save, self.manifest.files


class _Whole(Expression):
    """A whole tensor out of the rank files, of which those are opened that a selection takes something from."""

    def __init__(
        self, checkpoint: ShardedCheckpoint, name: str, tensor: WholeTensor, cover: tuple[Piece, ...], *, home: int
    ) -> None:
        """`cover` says which piece is taken from which file; what all files hold is taken from that of rank `home`."""
        self.checkpoint, self.name, self.cover, self.home = checkpoint, name, cover, home
        self.cut_dim = None if tensor.layout is None else tensor.layout.dim
        self.shape, self.dtype = torch.Size(tensor.shape), tensor.dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> LazyTensor:
        """What the ranges hold of each piece; along another dim than the cut one, the same of every piece."""
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
        """Every piece fills its own range of the cut dim."""
        yield from self._all().pieces(destination)

    def _all(self) -> LazyTensor:
        if self.cut_dim is None:
            return self._shard(self.home)
        return self.select(self.cut_dim, [(0, self.shape[self.cut_dim])])

    def _shard(self, rank: int) -> Stored:
        return self.checkpoint.shards(rank)[self.name]


def _describe(model: PreTrainedModel, folder: Path, save: str, files: Sequence[RankFile]) -> Manifest:
    whole = {name: (whole_like(tensor), layout_of(tensor)) for name, tensor in saved_state(model).items()}
    return Manifest(
        folder,
        save,
        tuple(files),
        {name: WholeTensor(meta.dtype, tuple(meta.shape), layout) for name, (meta, layout) in whole.items()},
        tuple(identity(entry) for entry in getattr(model, "_weight_conversions", None) or ()),
        str(model.dtype).removeprefix("torch."),
        untyped(model).tp_source,
        model.tp_plan or {},
    )


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
    """What is wrong with one file; None where its size and checksum are those of the manifest."""
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
    return CheckpointError(describe(f"checkpoint file {path}", got=got, expected=expected, fix=fix))


def refuse_ordinary_weights(folder: Path) -> None:
    """Raise CheckpointError where the folder holds weights that could be taken for those that are saved."""
    found = ordinary_weights(folder)
    if found:
        raise CheckpointError(
            describe(
                f"save_sharded to {folder}",
                got=f"a folder that holds {found[0]}",
                expected="a folder without other weights",
                fix="Choose another folder; one inside this one will do.",
            )
        )


def _remove_others(folder: Path, *, keep: set[str]) -> None:
    """Remove the rank files of earlier saves, also of those that were broken off."""
    for path in folder.iterdir():
        if RANK_FILE.fullmatch(path.name.removesuffix(".tmp")) and path.name not in keep:
            path.unlink(missing_ok=True)
