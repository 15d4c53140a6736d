"""The manifest of a pre-sharded checkpoint: which rank's file holds what. Trusts nothing that it reads.

It is a JSON file beside the rank files, and the index of a variant in the terms of transformers: with
`variant="sharded"`, transformers finds the rank files by its `weight_map`; without, it finds no weights in the folder
and says so. A folder is complete when it has a manifest, which is written last and put in place at once.

    metadata      {"dtype": "bfloat16"}                        what transformers reads
    weight_map    {"rank 0": "rank-00000-of-00002-1f3c.safetensors", ...}
    version       of this format
    save          a name that no other save has; every rank file bears it
    source        {"name": ..., "commit_hash": ...}            what the model was loaded from
    plan          {name pattern: strategy name}
    conversions   which of transformers' conversions the model went through when it was loaded
    layouts       [{"dim": 0, "ranges": [[[0, 6]], [[6, 9]]]}, ...]     what each rank holds of a dim
    tensors       {name: [dtype, whole shape, index into layouts or null for whole on every rank]}
    files         [{"name": ..., "size": in bytes, "crc32": ...}, ...]  by rank
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ..errors import CheckpointError, describe
from ..layout import Layout, Split
from .index import DTYPE_NAMES

VARIANT = "sharded"
"""What `from_pretrained` has to be given as `variant` for transformers to find the rank files."""

MANIFEST_NAME = f"model.safetensors.index.{VARIANT}.json"

RANK_FILE = re.compile(r"rank-\d{5}-of-\d{5}-[0-9a-f]{8}\.safetensors")
"""What rank files are called: no name of another form is opened or removed."""

_VERSION = 1
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_ORDINARY = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


@dataclass(frozen=True)
class RankFile:
    """What one rank wrote."""

    name: str
    size: int
    """In bytes."""
    crc32: str
    """Of the whole file, as 8 hexadecimal digits."""


@dataclass(frozen=True)
class WholeTensor:
    """One parameter or persistent buffer, of which the rank files hold the shards."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout | None
    """Who holds what; None where every rank holds it whole."""

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what the file of `rank` holds."""
        return self.shape if self.layout is None else self.layout.local_shape(self.shape, rank)


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of a pre-sharded checkpoint without opening its files."""

    folder: Path
    save: str
    files: tuple[RankFile, ...]
    tensors: Mapping[str, WholeTensor]
    conversions: tuple[Any, ...]
    dtype: str
    source: Mapping[str, str | None]
    plan: Mapping[str, str]

    @classmethod
    def find(cls, folder: Path) -> Manifest | None:
        """Read and check the manifest in `folder`; None where there is none.

        Raises CheckpointError on a manifest that is not well-formed, and on ordinary weights beside it.
        """
        path = folder / MANIFEST_NAME
        if not path.is_file():
            return None
        ordinary = ordinary_weights(folder)
        if ordinary:
            raise CheckpointError(
                describe(
                    f"checkpoint {folder}",
                    got=f"both {MANIFEST_NAME} and {ordinary[0]}",
                    expected="either pre-sharded or ordinary weights",
                    fix="Remove those that are not meant.",
                )
            )
        return _parse(path)

    def write(self) -> None:
        """Put the manifest into its folder, in place of another one."""
        layouts: dict[Layout, int] = {}
        for tensor in self.tensors.values():
            if tensor.layout is not None:
                layouts.setdefault(tensor.layout, len(layouts))
        content = {
            "metadata": {"dtype": self.dtype},
            "weight_map": {f"rank {rank}": file.name for rank, file in enumerate(self.files)},
            "version": _VERSION,
            "save": self.save,
            "source": self.source,
            "plan": self.plan,
            "conversions": self.conversions,
            "layouts": [{"dim": layout.dim, "ranges": layout.split.ranges} for layout in layouts],
            "tensors": {
                name: [DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.layout and layouts[tensor.layout]]
                for name, tensor in self.tensors.items()
            },
            "files": [vars(file) for file in self.files],
        }
        path = self.folder / MANIFEST_NAME
        temporary = path.with_suffix(f".{self.save}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def ordinary_weights(folder: Path) -> list[str]:
    """Names of the weights in `folder` that transformers loads by itself."""
    return [name for name in _ORDINARY if (folder / name).is_file()]


def refuse_without_plan(folder: Path) -> None:
    """Raise CheckpointError where `from_pretrained(folder)` without a plan could load nothing but pre-sharded files."""
    if (folder / MANIFEST_NAME).is_file() and not ordinary_weights(folder):
        raise CheckpointError(
            describe(
                f"checkpoint {folder}",
                got="a pre-sharded checkpoint without tp_plan",
                expected="tp_plan, on any number of ranks",
                fix='Pass tp_plan="auto"; save_pretrained of that model writes an ordinary checkpoint.',
            )
        )


def _parse(path: Path) -> Manifest:
    """Read a manifest. Raises CheckpointError that names the first thing that is not as it should be."""

    def check(is_so: bool, got: str, expected: str) -> None:
        if not is_so:
            fix = "The manifest is damaged or not one of ours; save the model again."
            raise CheckpointError(describe(f"checkpoint file {path}", got=got, expected=expected, fix=fix))

    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read as JSON: {error}") from None
    check(isinstance(content, dict), f"a JSON {type(content).__name__}", "a JSON object")
    version = content.get("version")
    check(version == _VERSION, f"version {version!r}", f"version {_VERSION}, the one that this release reads")

    def entry(key: str, kind: type) -> Any:
        value = content.get(key)
        check(isinstance(value, kind), f"{value!r} for {key}", f"a {kind.__name__}")
        return value

    save = entry("save", str)
    files = []
    for index, file in enumerate(entry("files", list)):
        file = file if isinstance(file, dict) else {}
        name, size, crc32 = file.get("name"), file.get("size"), file.get("crc32")
        is_name = isinstance(name, str) and RANK_FILE.fullmatch(name) is not None
        check(is_name, f"{name!r} for files[{index}]", "rank-<rank>-of-<size>-<save>.safetensors in the same folder")
        check(_is_count(size), f"{size!r} bytes for {name}", "a number of bytes")
        check(isinstance(crc32, str), f"checksum {crc32!r} for {name}", "a CRC-32")
        files.append(RankFile(name, size, crc32))
    names = [file.name for file in files]
    check(bool(files) and len(set(names)) == len(names), f"the files {names}", "one file a rank")
    weight_map = entry("weight_map", dict)
    check(sorted(map(str, weight_map.values())) == sorted(names), "a weight_map of other files", "one of files")
    layouts = [_layout(layout, index, len(files), check) for index, layout in enumerate(entry("layouts", list))]
    tensors = {}
    for name, tensor in entry("tensors", dict).items():
        check(isinstance(tensor, list) and len(tensor) == 3, f"{tensor!r} for {name}", "dtype, shape and layout")
        dtype, shape, index = tensor
        check(
            isinstance(dtype, str) and dtype in _DTYPES, f"dtype {dtype!r} for {name}", f"one of {', '.join(_DTYPES)}"
        )
        check(
            isinstance(shape, list) and all(map(_is_count, shape)), f"shape {shape!r} for {name}", "a list of lengths"
        )
        is_layout = index is None or (_is_count(index) and index < len(layouts))
        check(is_layout, f"layout {index!r} for {name}", f"null or a number below {len(layouts)}")
        layout = None if index is None else layouts[index]
        fits = layout is None or (layout.dim < len(shape) and layout.split.length == shape[layout.dim])
        check(fits, f"layout {index} for {name} of shape {shape}", "a cut of one of its dims")
        tensors[name] = WholeTensor(_DTYPES[dtype], tuple(shape), layout)
    return Manifest(
        path.parent,
        save,
        tuple(files),
        tensors,
        tuple(entry("conversions", list)),
        str(entry("metadata", dict).get("dtype")),
        entry("source", dict),
        entry("plan", dict),
    )


def _layout(entry: Any, index: int, size: int, check: Callable[[bool, str, str], None]) -> Layout:
    """One entry of `layouts`: ranges of `size` ranks that are a cut of a dim."""
    dim, ranges = (entry.get("dim"), entry.get("ranges")) if isinstance(entry, dict) else (None, None)
    well_formed = (
        _is_count(dim)
        and isinstance(ranges, list)
        and len(ranges) == size
        and all(isinstance(held, list) and all(map(_is_range, held)) for held in ranges)
    )
    check(well_formed, f"{str(entry)[:200]} for layouts[{index}]", f"a dim, and the ranges of {size} ranks")
    assert isinstance(dim, int)
    assert isinstance(ranges, list)
    held = tuple(tuple((start, stop) for start, stop in held) for held in ranges)
    split = Split(max((stop for part in held for _, stop in part), default=0), held)
    check(
        split.is_cut,
        f"{str(ranges)[:200]} for layouts[{index}]",
        "ranges that are a cut: nothing left out or overlapping",
    )
    return Layout(dim, split)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)) and value[0] <= value[1]
