"""GGUF: `from_pretrained(folder, gguf_file="model.gguf", tp_plan="auto")`."""

from __future__ import annotations

from ...seams import Feature


class GgufFiles(Feature):
    """llama.cpp's files: each rank reads and decodes the blocks of its slices."""

    requires = ("quantized",)
    storages = (".storage.GgufFile",)


FEATURE = GgufFiles()
