"""A safetensors file with a checksum of all its bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from torch import Tensor

from ...checkpoint.saving.writer import Writer


class SummedWriter(Writer):
    """A safetensors file that is written sequentially, with a running CRC-32."""

    crc32 = 0
    """CRC-32 of all bytes written so far, including the header."""
    _end = 0

    def write_all(self, values: Callable[[str], Tensor]) -> None:
        """Write the `values` of all tensors in file order, and finish the file (synced to disk)."""
        for name in list(self.pending):
            self.write(name, values(name))
        self.finish()

    def _put(self, position: int, data: bytes | memoryview) -> None:
        if position != self._end:
            raise RuntimeError(f"{self.path}: written at byte {position} after byte {self._end}")
        super()._put(position, data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self._end = self._file.tell()
