"""Files that change while they are read through a memory map."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.support.reading import columns
from tp_transformers import CheckpointError
from tp_transformers.checkpoint.reading.local_file import FileMap
from tp_transformers.checkpoint.reading.reader import read


def test_a_file_that_is_written_to_while_it_is_mapped(big: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, path, _ = big
    view = FileMap.view

    def writing(self: FileMap, *args: Any) -> torch.Tensor:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        return view(self, *args)

    monkeypatch.setattr(FileMap, "view", writing)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: got a file that changed while it was read"):
        read([columns(checkpoint)], threads=2)
