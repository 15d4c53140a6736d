"""The manifest of a pre-sharded checkpoint: the content of every rank's file. Everything read from it is validated.

It is a JSON file beside the rank files, in the form of transformers' index of a variant: with `variant="sharded"`,
transformers finds the rank files by its `weight_map`; without, it raises that the folder has no weights. A folder is
complete once it has a manifest, which is written last and moved into place atomically.

    metadata      {"dtype": "bfloat16"}                        for transformers
    weight_map    {"rank 0": "rank-00000-of-00002-1f3c.safetensors", ...}
    version       of this format
    save          unique name of the save; in the metadata and the name of every rank file
    source        {"name": ..., "commit_hash": ...}            the checkpoint that the model was loaded from
    plan          {name pattern: strategy name}
    shares        [2, 1] or null                               the share of each rank in every split, if not even
    conversions   transformers' conversions that the load applied
    layouts       [{"dim": 0, "ranges": [[[0, 6]], [[6, 9]]]}, ...]     the ranges of a dim that each rank holds
    tensors       {name: [dtype, full shape, index into layouts or null if replicated]}
    files         [{"name": ..., "size": in bytes, "crc32": ...}, ...]  by rank
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ...checkpoint.reading.header import DTYPE_NAMES, DTYPES
from ...checkpoint.saving.writer import named
from ...errors import CheckpointError, UnsupportedError
from ...slices.layout import Layout, Split

VARIANT = "sharded"
"""The `variant` under which transformers finds the rank files."""

MANIFEST_NAME = f"model.safetensors.index.{VARIANT}.json"

RANK_FILE = re.compile(r"rank-\d{5}-of-\d{5}-[0-9a-f]{8}\.safetensors")
"""Names of rank files; files with other names are never opened or removed."""

_SAVE = re.compile(r"[0-9a-f]{8}")
_VERSION = 1
_ORDINARY = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


@dataclass(frozen=True)
class RankFile:
    name: str
    size: int
    """In bytes."""
    crc32: str
    """CRC-32 of the complete file, as 8 hexadecimal digits."""


@dataclass(frozen=True)
class ManifestTensor:
    """One parameter or persistent buffer with its shards in the rank files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout | None
    """Ranges that each rank holds; None for a replicated tensor."""

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return self.shape if self.layout is None else self.layout.local_shape(self.shape, rank)


@dataclass(frozen=True)
class Manifest:
    """A pre-sharded checkpoint, without the content of its files."""

    folder: Path
    save_id: str
    """The random id of one save, in its rank files too. (nnsight gives all objects, so a field `save`, a default.)"""
    files: tuple[RankFile, ...]
    tensors: Mapping[str, ManifestTensor]
    conversions: tuple[Any, ...]
    dtype: str
    source: Mapping[str, str | None]
    plan: Mapping[str, str]
    shares: tuple[float, ...] | None = None
    """The share of each rank in every split; None: even."""

    @classmethod
    def find(cls, folder: Path) -> Manifest | None:
        """Read and check the manifest in `folder`; None if there is none.

        Raises CheckpointError on a malformed manifest, and on ordinary weights beside it.
        """
        path = folder / MANIFEST_NAME
        if not path.is_file():
            return None
        ordinary = ordinary_weights(folder)
        if ordinary:
            raise CheckpointError(
                f"checkpoint {folder}",
                got=f"both {MANIFEST_NAME} and {ordinary[0]}",
                expected="either pre-sharded or ordinary weights",
                fix="Remove those that are not meant.",
            )
        return _Parser(path).manifest()

    def write(self, folder: Path) -> None:
        """Write the manifest into the staging `folder` of a save."""
        layouts: dict[Layout, int] = {}
        for tensor in self.tensors.values():
            if tensor.layout is not None:
                layouts.setdefault(tensor.layout, len(layouts))
        content = {
            "metadata": {"dtype": self.dtype},
            "weight_map": {f"rank {rank}": file.name for rank, file in enumerate(self.files)},
            "version": _VERSION,
            "save": self.save_id,
            "source": self.source,
            "plan": self.plan,
            "shares": self.shares,
            "conversions": self.conversions,
            "layouts": [{"dim": layout.dim, "ranges": layout.split.ranges} for layout in layouts],
            "tensors": {
                name: [DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.layout and layouts[tensor.layout]]
                for name, tensor in self.tensors.items()
            },
            "files": [vars(file) for file in self.files],
        }
        path = folder / MANIFEST_NAME
        with named(path):
            path.write_text(json.dumps(content), encoding="utf-8")


def ordinary_weights(folder: Path) -> list[str]:
    """List the weight files in `folder` that transformers loads by default."""
    return [name for name in _ORDINARY if (folder / name).is_file()]


def check_ordinary_save(folder: Path, variant: str | None) -> None:
    """Raise CheckpointError if the folder holds a pre-sharded checkpoint: loads reject ordinary weights beside one.

    Raises UnsupportedError for the variant of rank files.
    """
    if variant == VARIANT:
        raise UnsupportedError(
            "save_pretrained",
            got=f"variant={variant!r}, by which pre-sharded checkpoints are found",
            expected="another",
            fix="Choose another; or call tp_transformers.save_sharded(model, folder).",
        )
    if os.path.lexists(folder / MANIFEST_NAME):
        raise CheckpointError(
            f"save_pretrained to {folder}",
            got=f"a folder that holds {MANIFEST_NAME}",
            expected="a folder without a pre-sharded checkpoint",
            fix="Choose another folder; one inside this one will do.",
        )


class _Parser:
    """A parser of manifests that raises CheckpointError on the first invalid entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"checkpoint file {path} cannot be read as JSON: {error}") from None
        if not isinstance(self.content, dict):
            raise self.fault(self.content, "a JSON object")
        if self.entry("version", int) != _VERSION:
            raise self.fault(f"version {self.content['version']}", f"version {_VERSION}, which this release reads")

    def manifest(self) -> Manifest:
        files = tuple(self.file(file) for file in self.entry("files", list))
        names = sorted(file.name for file in files)
        if not names or len(set(names)) != len(names):
            raise self.fault(f"the files {names}", "one file a rank")
        weight_map = self.entry("weight_map", dict)  # transformers uses this one
        if sorted(map(str, weight_map.values())) != names:
            raise self.fault(f"the weight_map {weight_map}", f"one of the files {names}")
        if not self.entry("tensors", dict):
            raise self.fault("no tensors", "those of a model")
        if not _SAVE.fullmatch(self.entry("save", str)):
            raise self.fault(f"{self.content['save']!r} for save", "8 hexadecimal digits")
        layouts = [self.layout(layout, len(files)) for layout in self.entry("layouts", list)]
        return Manifest(
            folder=self.path.parent,
            save_id=self.entry("save", str),
            files=files,
            tensors={name: self.tensor(name, tensor, layouts) for name, tensor in self.entry("tensors", dict).items()},
            conversions=tuple(self.entry("conversions", list)),
            dtype=str(self.entry("metadata", dict).get("dtype")),
            source=self.entry("source", dict),
            plan=self.entry("plan", dict),
            shares=self.shares(len(files)),
        )

    def shares(self, size: int) -> tuple[float, ...] | None:
        """Parse the shares of `size` ranks; manifests of earlier releases have none."""
        shares = self.content.get("shares")
        if shares is None:
            return None
        if not (isinstance(shares, list) and len(shares) == size and all(map(_is_share, shares))):
            raise self.fault(f"{shares!r} for shares", f"null, or a positive number for each of {size} ranks")
        return tuple(shares)

    def entry(self, key: str, kind: type) -> Any:
        value = self.content.get(key)
        if not isinstance(value, kind):
            raise self.fault(f"{value!r} for {key}", f"a {kind.__name__}")
        return value

    def file(self, entry: Any) -> RankFile:
        """Parse one entry of `files`; its name stays inside the folder."""
        entry = entry if isinstance(entry, dict) else {}
        name, size, crc32 = (entry.get(key) for key in ("name", "size", "crc32"))
        if not isinstance(name, str) or not RANK_FILE.fullmatch(name):
            raise self.fault(f"the file {name!r}", "rank-<rank>-of-<size>-<save>.safetensors in the same folder")
        if not _is_count(size) or not isinstance(crc32, str):
            raise self.fault(f"size {size!r} and checksum {crc32!r} for {name}", "a number of bytes and a CRC-32")
        return RankFile(name, size, crc32)

    def layout(self, entry: Any, size: int) -> Layout:
        """Parse one entry of `layouts`: the ranges of a dim that each of `size` ranks holds."""
        dim, ranges = (entry.get("dim"), entry.get("ranges")) if isinstance(entry, dict) else (None, None)
        if not (
            isinstance(dim, int)
            and dim >= 0
            and isinstance(ranges, list)
            and len(ranges) == size
            and all(isinstance(held, list) and all(map(_is_range, held)) for held in ranges)
        ):
            raise self.fault(f"the layout {entry!r}", f"a dim, and the ranges that each of {size} ranks holds")
        held = tuple(tuple((start, stop) for start, stop in held) for held in ranges)
        split = Split(max((stop for rank_ranges in held for _, stop in rank_ranges), default=0), held)
        if not split.is_complete:
            raise self.fault(
                f"the layout {entry!r}", "a complete split: ranges that leave nothing out and do not overlap"
            )
        return Layout(dim, split)

    def tensor(self, name: str, entry: Any, layouts: Sequence[Layout]) -> ManifestTensor:
        """Parse one entry of `tensors`; its layout fits its shape."""
        dtype, shape, index = entry if isinstance(entry, list) and len(entry) == 3 else (None, None, None)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self.fault(f"dtype {dtype!r} for {name}", f"one of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or not all(map(_is_count, shape)):
            raise self.fault(f"shape {shape!r} for {name}", "a list of lengths")
        if index is not None and not (_is_count(index) and index < len(layouts)):
            raise self.fault(f"layout {index!r} for {name}", f"null or a number below {len(layouts)}")
        layout = None if index is None else layouts[index]
        if layout is not None and (layout.dim >= len(shape) or layout.split.length != shape[layout.dim]):
            raise self.fault(f"layout {index} for {name} of shape {shape}", "a split of one of its dims")
        return ManifestTensor(DTYPES[dtype], tuple(shape), layout)

    def fault(self, got: Any, expected: str) -> CheckpointError:
        got = str(got)[:300]
        fix = "The manifest is damaged or not one of ours; save the model again."
        return CheckpointError(f"checkpoint file {self.path}", got=got, expected=expected, fix=fix)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= sys.maxsize


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)) and value[0] <= value[1]
