"""GGUF headers -> one lazy tensor per stored tensor. Headers are validated, not trusted.

    "GGUF", version, number of tensors, number of metadata entries
    metadata     key, type, value
    tensors      name, dims from the last to the first, type, offset
    padding, then the values of each tensor at its offset

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from typing import Any

import torch

from ...errors import CheckpointError, UnsupportedError
from ...slices.stored import Source, Stored

ARCHITECTURE = "general.architecture"
"""Metadata key of the architecture's name in llama.cpp."""

_FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
_INTEGERS = {24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64}
_DTYPES = _FLOATS | _INTEGERS
"""Types of tensors that are no blocks."""

_SCALARS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"))) | {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
"""Types of metadata."""

_STEP = 1 << 16
"""Bytes of the header read at a time."""


class Blocks(Stored):
    """A stored tensor of quantised blocks, as bytes: (..., rows, bytes of a row)."""

    kind: int
    """The type of the blocks, a `gguf.GGMLQuantizationType`."""


def read_gguf_header(source: Source) -> dict[str, Stored]:
    """Parse and check the header of a GGUF file: {name: lazy tensor}, in file order; fills `source.metadata`.

    Raises:
        CheckpointError: a malformed header, or tensors that overlap or lie outside the file.
        UnsupportedError: an unknown type of blocks, or the package `gguf` is not installed.
    """
    header = _Header(source)
    if header.take(4) != b"GGUF":
        raise _malformed(source, "other first bytes", "GGUF")
    version, tensors, entries = header.values("<IQQ")
    if version not in (2, 3):
        raise _malformed(source, f"version {version}", "2 or 3, with the lowest byte first")
    source.metadata = {header.string(): header.metadata(header.values("<I")[0]) for _ in range(entries)}
    entry = [(header.string(), _dims(header), *header.values("<IQ")) for _ in range(tensors)]
    alignment = source.metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or not isinstance(source.metadata.get(ARCHITECTURE), str):
        raise _malformed(source, "no valid alignment or architecture in its metadata", "both")
    source.header_hash = header.hash.hexdigest()
    start = -(-header.position // alignment) * alignment
    result: dict[str, Stored] = {}
    for name, dims, kind, offset in sorted(entry, key=lambda entry: entry[3]):
        if name in result:
            raise _malformed(source, f"two tensors {name}", "one")
        result[name] = _stored(source, name, dims, kind, start + offset)
    position = start
    for name, stored in result.items():
        if stored.offset < position:
            raise _malformed(source, f"{name} in the bytes of the tensor before it", "tensors one after the other")
        position = stored.offset + stored.nbytes
    return result


def _dims(header: _Header) -> tuple[int, ...]:
    (count,) = header.values("<I")
    if count > 8:
        raise _malformed(header.source, f"a tensor of {count} dims", "at most 4")
    return tuple(reversed(header.values(f"<{count}Q")))


def _stored(source: Source, name: str, dims: tuple[int, ...], kind: int, offset: int) -> Stored:
    shape, dtype = dims, _DTYPES.get(kind, torch.uint8)
    if kind not in _DTYPES:
        length, nbytes = _block(source, name, kind)
        if not dims or dims[-1] % length:
            raise _malformed(source, f"tensor {name} of shape {dims}", f"rows of complete blocks of {length}")
        shape = (*dims[:-1], dims[-1] // length * nbytes)
    if max(shape, default=0) > sys.maxsize:
        raise _malformed(source, f"tensor {name} of shape {dims}", "smaller dims")
    stop = offset + math.prod(shape) * dtype.itemsize
    if stop > source.size:
        got = f"tensor {name} ending at byte {stop} of a file of {source.size}"
        raise source.fault(got, "every tensor inside the file", "The file is truncated; download it again.")
    if kind in _DTYPES:
        return Stored(source, offset=offset, shape=shape, dtype=dtype)
    blocks = Blocks(source, offset=offset, shape=shape, dtype=dtype)
    blocks.kind = kind
    return blocks


def _block(source: Source, name: str, kind: int) -> tuple[int, int]:
    """(values, bytes) of a block. Raises UnsupportedError for a type that the package `gguf` cannot decode."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        fix = "pip install gguf"
        raise UnsupportedError(
            f"{source.name}", got="no package gguf", expected="it, to decode blocks", fix=fix
        ) from None
    try:
        sizes: tuple[int, int] = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        fix = "Update it (pip install -U gguf), or choose a file in another type."
        expected = "one that the installed package gguf knows"
        raise UnsupportedError(f"tensor {name}", got=f"blocks of type {kind}", expected=expected, fix=fix) from None
    return sizes


class _Header:
    """Reads the header of a file in order."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.position = 0
        """Offset of the next byte in the file."""
        self.hash = hashlib.blake2b(digest_size=16)
        self._data, self._next = b"", 0

    def take(self, length: int) -> bytes:
        """The next bytes. Raises CheckpointError at the end of the file."""
        stop = self._next + length
        if stop > len(self._data):
            first = self.position - self._next + len(self._data)
            missing = max(stop - len(self._data), min(_STEP, self.source.size - first))
            if first + missing > self.source.size:
                raise _malformed(self.source, f"a header that continues after byte {self.source.size}", "its end")
            self._data = self._data[self._next :] + self.source.read_bytes(first, missing)
            self._next, stop = 0, length
        value = self._data[self._next : stop]
        self.position, self._next = self.position + length, stop
        self.hash.update(value)
        return value

    def values(self, layout: str) -> tuple[Any, ...]:
        """The next values of a `struct` layout."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        """The next string."""
        return self.take(self.values("<Q")[0]).decode("utf-8", "replace")

    def metadata(self, kind: int) -> Any:
        """The next value of metadata; None for an array, which is skipped."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.values("<IQ")
            if inner in _SCALARS:
                self.take(struct.calcsize(_SCALARS[inner]) * count)
            elif inner == _STRING:
                for _ in range(count):
                    self.take(self.values("<Q")[0])
            else:
                raise _malformed(self.source, f"an array of type {inner}", "one of strings, numbers or booleans")
            return None
        if kind not in _SCALARS:
            raise _malformed(self.source, f"metadata of type {kind}", "one of GGUF's 13")
        return self.values(_SCALARS[kind])[0]


def _malformed(source: Source, got: str, expected: str) -> CheckpointError:
    return source.fault(got, expected, "The file is damaged or not GGUF; download it again.")
