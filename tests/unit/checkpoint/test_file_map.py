"""Files that lose bytes while they are read through a memory map."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.reading import columns
from tp_transformers import CheckpointError
from tp_transformers.checkpoint.reading.file_map import FileMap, survive_truncation
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.checkpoint.reading.jobs import Request
from tp_transformers.checkpoint.reading.reader import read


@pytest.mark.parametrize("keep", [0, 1 << 20])
@pytest.mark.parametrize("dumps", [True, False])
def test_a_file_that_is_truncated_while_it_is_mapped(big, keep: int, dumps: bool, monkeypatch) -> None:
    """A real SIGBUS in a copying thread, under faulthandler's handler and under none."""
    checkpoint, path, _ = big
    view = FileMap.view

    def truncating(self: FileMap, *args: Any) -> torch.Tensor:
        os.truncate(path, keep)
        return view(self, *args)

    monkeypatch.setattr(FileMap, "view", truncating)
    was_enabled = faulthandler.is_enabled()
    (faulthandler.enable if dumps else faulthandler.disable)()
    try:
        before = signal.getsignal(signal.SIGBUS)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated while it was read"):
            read([columns(checkpoint)], threads=2)
        if not dumps:
            assert signal.getsignal(signal.SIGBUS) == before == signal.SIG_DFL
    finally:
        (faulthandler.enable if was_enabled else faulthandler.disable)()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-")]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_file_that_was_truncated_is_the_one_that_is_named(tmp_path: Path, bad: int, monkeypatch) -> None:
    """The others keep their maps, and what is read from them is right."""
    values = torch.arange(256 * 2048, dtype=torch.int32).view(256, 2048)
    paths = [tmp_path / f"{index}.safetensors" for index in range(3)]
    for path in paths:
        save_file({path.stem: values}, path)
    view = FileMap.view
    with Checkpoint(paths) as checkpoint:
        lost = checkpoint.sources[bad].map()

        def truncating(self: FileMap, *args: Any) -> torch.Tensor:
            if self is lost:
                os.truncate(paths[bad], 0)
            return view(self, *args)

        monkeypatch.setattr(FileMap, "view", truncating)
        tensors = [checkpoint.tensors[path.stem].select(1, [(0, 1024)]) for path in paths]
        requests = [Request(tensor, torch.empty(tensor.shape, dtype=tensor.dtype)) for tensor in tensors]
        with pytest.raises(CheckpointError, match=rf"{bad}\.safetensors: truncated while it was read"):
            read(requests, threads=1)
        assert [source.map().lost for source in checkpoint.sources] == [index == bad for index in range(3)]
        for index in range(bad):
            assert torch.equal(requests[index].destination, values[:, :1024])


def test_a_signal_without_a_truncated_file_names_all_that_are_mapped(tmp_path: Path, monkeypatch) -> None:
    """Bytes that a disk cannot give raise the same signal, which does not say of which file they are."""
    paths = [tmp_path / f"{index}.safetensors" for index in range(2)]
    for path in paths:
        save_file({path.stem: torch.zeros(64, 2048)}, path)
    view = FileMap.view

    def failing(self: FileMap, *args: Any) -> torch.Tensor:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGBUS)
        return view(self, *args)

    monkeypatch.setattr(FileMap, "view", failing)
    with Checkpoint(paths) as checkpoint:
        tensors = [checkpoint.tensors[path.stem].select(1, [(0, 1024)]) for path in paths]
        with pytest.raises(CheckpointError, match=r"0\.safetensors, .*1\.safetensors: got bytes of a memory map that"):
            read([Request(tensor, torch.empty(tensor.shape)) for tensor in tensors])


def test_the_signal_is_always_seen(tmp_path: Path, monkeypatch) -> None:
    """Also by a main thread that the copying one keeps from being told."""
    view = FileMap.view
    monkeypatch.setattr(FileMap, "view", lambda *arguments: (os.truncate(path, 0), view(*arguments))[1])
    for index in range(100):
        path = tmp_path / f"{index}.safetensors"
        save_file({"x": torch.zeros(8, 4096)}, path)
        with Checkpoint([path]) as checkpoint:
            tensor = checkpoint.tensors["x"].select(1, [(0, 1024)])
            with pytest.raises(CheckpointError, match="truncated while it was read"):
                read([Request(tensor, torch.empty(tensor.shape))])


def test_handlers_are_put_back(big) -> None:
    checkpoint, _, _ = big

    def own(number: int, frame: Any) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGBUS, own)
    try:
        with survive_truncation([checkpoint.sources[0].map()]):
            assert signal.getsignal(signal.SIGBUS) is not own
        assert signal.getsignal(signal.SIGBUS) is own
    finally:
        signal.signal(signal.SIGBUS, before)
