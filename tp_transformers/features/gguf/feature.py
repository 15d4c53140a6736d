"""GGUF: `from_pretrained(folder, gguf_file="model.gguf", tp_plan="auto")`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...loading.storage import Storage


class GgufFiles(Feature):
    """llama.cpp's files: each rank reads and decodes the blocks of its slices."""

    requires = ("quantized",)

    def storages(self) -> Sequence[type[Storage]]:
        from .storage import GgufFile

        return (GgufFile,)


FEATURE = GgufFiles()
