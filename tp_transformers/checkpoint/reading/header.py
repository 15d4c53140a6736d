"""Safetensors headers -> one lazy tensor per stored tensor. Headers are validated, not trusted."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...slices.lazy import LazyTensor
from ...slices.stored import Source, Stored
from ...transformers_api import str_to_torch_dtype
from .local_file import LocalFile

DTYPES: dict[str, torch.dtype] = {**str_to_torch_dtype, "C64": torch.complex64, "F8_E8M0": torch.float8_e8m0fnu}
"""Name of a dtype in a safetensors header -> the dtype; transformers' table, completed."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""torch dtype -> its name in a safetensors header."""

HEADER_LIMIT = 100_000_000
"""The longest header that safetensors itself accepts, in bytes."""


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """Open checkpoint files and the lazy tensors in them; a context manager that closes every file."""

    def __init__(
        self, files: Iterable[str | os.PathLike[str] | Source], *, weight_map: Mapping[str, str] | None = None
    ) -> None:
        """Open `files`, sources or paths, and read their headers.

        `weight_map`, the {tensor name: file name} of an index, is compared to the headers.
        Raises CheckpointError on a file that is missing, truncated, not safetensors, or inconsistent with the index.
        """
        self.sources: list[Source] = []
        self.tensors: dict[str, LazyTensor] = {}
        with ExitStack() as opened:
            homes: dict[str, str] = {}
            for file in files:
                source = file if isinstance(file, Source) else LocalFile(file)
                opened.callback(source.close)
                self.sources.append(source)
                for name, tensor in self.read(source).items():
                    if name in homes:
                        raise CheckpointError(f"tensor {name} is in two files: {homes[name]} and {source.name}")
                    homes[name] = source.name
                    self.tensors[name] = tensor
            for name, home in (weight_map or {}).items():
                if os.path.basename(homes.get(name, "")) != os.path.basename(home):
                    got = f"it in {homes[name]}" if name in homes else "it in none of the files"
                    subject, fix = f"tensor {name}", "Index and files are of different checkpoints; download it again."
                    raise CheckpointError(subject, got=got, expected=f"it in {home}, where the index puts it", fix=fix)
            opened.pop_all()

    def read(self, source: Source) -> Mapping[str, LazyTensor]:
        """The tensors in one file. Raises CheckpointError on a malformed header."""
        return read_header(source)

    @property
    def bytes_read(self) -> int:
        """Bytes read from all files so far, headers included."""
        return sum(source.bytes_read for source in self.sources)

    @property
    def reads(self) -> int:
        """Reads issued to all files so far."""
        return sum(source.reads for source in self.sources)

    @property
    def opened(self) -> Sequence[Source | None]:
        """The files, in the same order on all ranks; None for a file that this rank has not opened."""
        return self.sources

    @property
    def signature(self) -> object:
        """A value that is equal on all ranks if they read the same list of files; contents are not compared."""
        return [os.path.basename(source.name) for source in self.sources]

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file was replaced or modified since it was opened."""
        for source in self.sources:
            source.check_unchanged()

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_files(
    paths: Collection[str], *, folder: str | os.PathLike[str], endings: Sequence[str] = (".safetensors",)
) -> None:
    """Raise CheckpointError if there are no files, on other formats (`.bin`), and on paths outside a local `folder`."""
    subject = f"checkpoint {folder}"
    if not paths:
        raise CheckpointError(subject, got="no weight files", expected="safetensors files", fix="Add them.")
    for path in paths:
        if not path.endswith(tuple(endings)):
            raise CheckpointError(
                subject,
                got=f"the file {os.path.basename(path)}",
                expected="safetensors files, of which a rank can read its slices alone",
                fix="Convert once, in one process without tp_plan: AutoModelForCausalLM.from_pretrained(folder)"
                ".save_pretrained(new_folder).",
            )
    if os.path.isdir(folder):
        root = os.path.abspath(folder)
        for path in paths:
            if os.path.commonpath([root, os.path.abspath(path)]) != root:
                got = f"an index that names {path}"
                fix = "Do not load it unless you trust where it comes from; correct the index."
                raise CheckpointError(subject, got=got, expected="files inside the checkpoint's own folder", fix=fix)


def with_variant(name: str, variant: str | None) -> str:
    """The name of the file `name` in a variant of a checkpoint: "model.fp16.safetensors"."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}.{variant}.{ending}" if variant else name


def read_index(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Read the `weight_map` {tensor name: file name} and the `metadata` of an index file.

    Raises CheckpointError, with the file, on an unreadable or malformed index.
    """
    try:
        content = json.loads(Path(path).read_bytes().decode(), object_pairs_hook=_without_duplicates)
        if not isinstance(content, dict):
            raise ValueError(f"it is a JSON {type(content).__name__}")
        weight_map, metadata = content.get("weight_map"), content.get("metadata")
        if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
            raise ValueError("its weight_map or its metadata is missing, or no JSON object")
        odd = next((name for name, file in weight_map.items() if not isinstance(file, str) or not file), None)
        if odd is not None:
            raise ValueError(f"its file for {odd} is {weight_map[odd]!r}")
        return weight_map, metadata
    except (OSError, ValueError, RecursionError) as error:
        got = f"an index that cannot be read ({error})"
        expected = "a JSON object with metadata, and a weight_map that names the file of every tensor"
        fix = "The index is damaged; download it again, or save the model again."
        raise CheckpointError(f"checkpoint file {os.fspath(path)}", got=got, expected=expected, fix=fix) from error


def read_header(source: Source) -> dict[str, Stored]:
    """Parse and check the header of a safetensors file: {name: lazy tensor}, in file order.

    Raises CheckpointError on a malformed header, on gaps or overlaps, and on tensors outside the file.
    """
    if source.size < 8:
        raise _malformed(source, f"{source.size} bytes", "at least the 8 bytes of a header length")
    length = int.from_bytes(source.read_bytes(0, 8), "little")
    if length > min(source.size - 8, HEADER_LIMIT):
        raise _malformed(
            source,
            f"a header of {length} bytes in a file of {source.size}",
            f"a header inside the file and of at most {HEADER_LIMIT} bytes",
        )
    text = source.read_bytes(8, length)
    source.header_hash = hashlib.blake2b(text, digest_size=16).hexdigest()
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_duplicates, parse_constant=_reject_constant)
        json.dumps(header, ensure_ascii=False).encode()  # raises on unpaired surrogates
    except (ValueError, RecursionError) as error:  # ValueError: JSONDecodeError, Unicode*Error and our own
        raise _malformed(source, f"a header that is not JSON ({error})", "a JSON header in UTF-8") from None
    if not isinstance(header, dict):
        raise _malformed(source, f"a header that is a JSON {type(header).__name__}", "a JSON object")
    declared = header.pop("__metadata__", None)
    declared = {} if declared is None else declared
    if not isinstance(declared, dict) or not all(isinstance(value, str) for value in declared.values()):
        raise _malformed(source, f"the __metadata__ {declared!r}", "strings by name")
    source.metadata = declared
    tensors = {name: _stored(source, name, entry, data_start=8 + length) for name, entry in header.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    position, before = 8 + length, "the header"
    for name, stored in tensors.items():
        if stored.offset != position:
            problem = f"{name} and {before} in the same bytes" if stored.offset < position else f"a gap before {name}"
            raise _malformed(source, problem, "tensors one after the other")
        position, before = stored.offset + stored.nbytes, name
    if position != source.size:
        raise _malformed(source, f"{source.size - position} bytes after the last tensor", "an end after it")
    return tensors


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raises ValueError on a duplicate key: parsers differ in the value that they keep."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return result


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _stored(source: Source, name: str, entry: Any, *, data_start: int) -> Stored:
    try:
        dtype_name, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (*shape, start, stop)
        well_formed = all(type(number) is int and 0 <= number <= sys.maxsize for number in numbers)
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise _malformed(source, f"the entry {entry!r} for tensor {name}", "dtype, shape and two data_offsets")
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise _malformed(source, f"dtype {dtype_name!r} for tensor {name}", f"one of {', '.join(DTYPES)}")
    dtype = DTYPES[dtype_name]
    nbytes = math.prod(shape) * dtype.itemsize
    if stop - start != nbytes:
        raise _malformed(
            source, f"{stop - start} bytes for tensor {name}", f"{nbytes} bytes for {dtype_name} of shape {shape}"
        )
    if data_start + stop > source.size:
        got = f"tensor {name} ending at byte {data_start + stop} of a file of {source.size}"
        raise source.fault(got, "every tensor inside the file", "The file is truncated; download it again.")
    return Stored(source, offset=data_start + start, shape=shape, dtype=dtype)


def _malformed(source: Source, got: str, expected: str) -> CheckpointError:
    return source.fault(got, expected, "The file is damaged or not safetensors; download it again.")
