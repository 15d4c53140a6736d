"""Reads of a checkpoint's files before the model is made."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import _get_resolved_checkpoint_files

from tp_transformers.checkpoint.reading.local_file import LocalFile
from tp_transformers.errors import CheckpointError
from tp_transformers.features.page_cache import ahead, prefetch

BLOCK = 1000


def launched(monkeypatch: pytest.MonkeyPatch, *, rank: int, local_size: int) -> None:
    """This process is one of two ranks of torchrun, of which so many are on this node."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": local_size}.items():
        monkeypatch.setenv(name, str(value))


def evict(file: LocalFile, span: tuple[int, int]) -> None:
    """Write the file to the disk, and drop its pages, which the system may hold for a moment."""
    os.fsync(file.fd)
    for _ in range(100):
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not file.is_resident([span]):
            return
        time.sleep(0.05)
    pytest.skip("the file system keeps all files in memory")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ranges that are fetched, but for those that ask the file system."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(ahead, "BLOCK_BYTES", BLOCK)
    fetch = prefetch.fetch

    def noted(file: LocalFile, start: int, stop: int) -> None:
        fetch(file, start, stop)
        if (start, stop) != (0, 1):
            ranges.append((start, stop))

    monkeypatch.setattr(ahead, "fetch", noted)
    return ranges


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of which the first page alone is in memory, as the system says."""
    save_file({"x": torch.arange(2048.0)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(LocalFile, "is_resident", lambda self, spans: list(spans) == [(0, 1)])
    return tmp_path


def test_the_ranks_take_blocks_in_turn(
    cold: Path, fetched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (cold / "model.safetensors").stat().st_size
    for rank in range(2):
        launched(monkeypatch, rank=rank, local_size=2)
        with ahead.reading_ahead([cold], {}):
            wait(ahead._reads.get() or ())
        assert all(start % (2 * BLOCK) == rank * BLOCK for start, _ in fetched[-4:])
    assert sorted(fetched) == [(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]


def test_the_load_stops_the_reads(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that have begun end; the others do not begin."""
    begun: list[int] = []
    stopped = threading.Event()

    def waits(file: LocalFile, start: int, stop: int) -> None:
        if (start, stop) != (0, 1):
            begun.append(start)
            assert stopped.wait(30)

    monkeypatch.setattr(ahead, "BLOCK_BYTES", 8)
    monkeypatch.setattr(ahead, "fetch", waits)
    with ahead.reading_ahead([cold], {}):
        ahead.stop()
        stopped.set()
    assert len(begun) <= prefetch.THREADS


@pytest.mark.parametrize("why", ["cached", "several nodes", "no memory", "a file system that does not tell", "option"])
def test_nothing_is_read_ahead(
    why: str, cold: Path, fetched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "cached":
        monkeypatch.setattr(LocalFile, "is_resident", lambda self, spans: True)
    elif why == "several nodes":
        launched(monkeypatch, rank=0, local_size=1)
    elif why == "no memory":
        monkeypatch.setattr(ahead, "available_memory", lambda: 1000)
    elif why == "a file system that does not tell":
        monkeypatch.setattr(LocalFile, "is_resident", lambda self, spans: False)
    with ahead.reading_ahead([cold], {"tp_prefetch": False} if why == "option" else {}):
        wait(ahead._reads.get() or ())
    assert fetched == []


@pytest.mark.parametrize("sendfile", [True, False])
def test_fetched_bytes_are_in_the_page_cache(tmp_path: Path, sendfile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a file system from which the system cannot send."""
    if not sendfile:

        def refuses(*args: Any) -> int:
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(os, "sendfile", refuses)
    path = tmp_path / "x"
    path.write_bytes(bytes(64 << 20))
    file, span = LocalFile(path), (32 << 20, 64 << 20)
    evict(file, span)
    prefetch.fetch(file, *span)
    assert file.is_resident([span])
    os.close(file.fd)
    with pytest.raises(CheckpointError, match="reading at byte 0 failed"):
        prefetch.fetch(file, 0, 100)
    file.fd = -1


def test_a_fetch_leaves_no_descriptor(tmp_path, monkeypatch) -> None:
    """A daemon closes all descriptors: by one that stays, later fetches would write to its next file."""
    sinks: list[int] = []
    monkeypatch.setattr(os, "sendfile", lambda sink, *_: sinks.append(sink) or 0)
    (tmp_path / "x").write_bytes(b"x")
    with closing(LocalFile(tmp_path / "x")) as file:
        prefetch.fetch(file, 0, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sinks[0])


@pytest.mark.parametrize("shards", ["1GB", "100KB"])
@pytest.mark.parametrize("where", ["folder", "subfolder", "variant", "hub"])
def test_the_files_are_those_that_transformers_finds(
    where: str, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))
    given: dict[str, Any] = {}
    name, folder = str(tmp_path), tmp_path
    if where == "subfolder":
        given, folder = {"subfolder": "inner"}, tmp_path / "inner"
    elif where == "variant":
        given = {"variant": "fp16"}
    elif where == "hub":
        given, name = {"cache_dir": str(tmp_path)}, "somebody/llama"
        folder = tmp_path / "models--somebody--llama" / "snapshots" / "abc"
        (folder / "../../refs").resolve().mkdir(parents=True)
        (folder / "../../refs/main").resolve().write_text("abc")
    model.save_pretrained(folder, max_shard_size=shards, **({"variant": "fp16"} if where == "variant" else {}))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found, _ = _get_resolved_checkpoint_files(
        name,
        variant=given.get("variant"),
        gguf_file=None,
        use_safetensors=None,
        download_kwargs={key: value for key, value in given.items() if key != "variant"},
        user_agent={},
        is_remote_code=False,
        transformers_explicit_filename=None,
    )
    assert ahead._paths([name], given) == found
    assert len(found or ()) == (1 if shards == "1GB" else len(list(folder.glob("*.safetensors")))) > 0


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for text in ('{"metadata": {}, "weight_map": {"x": "lost.safetensors"}}', "{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        assert ahead._paths([tmp_path], {}) == []
    assert ahead._paths(["somebody/nowhere"], {}) == ahead._paths([".."], {}) == ahead._paths([], {}) == []
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert ahead._paths([], {"pretrained_model_name_or_path": tmp_path}) == [str(tmp_path / "model.safetensors")]
    for other in ({"gguf_file": "x.gguf"}, {"force_download": True}, {"use_safetensors": False}):
        assert ahead._paths([tmp_path], other) == []
    with ahead.reading_ahead([tmp_path], {}):
        pass  # the load tells that the file is empty
    monkeypatch.setattr(ahead, "_paths", lambda *_: [str(tmp_path / "lost")])
    with ahead.reading_ahead([tmp_path], {}):
        pass  # or that it is gone


BEFORE_MODELS = """
import sys, tp_transformers
from transformers import AutoModelForCausalLM
tp_transformers.enable()
from tp_transformers.features.page_cache import ahead
seen = []
ahead._paths = lambda *given: seen.append('transformers.modeling_utils' in sys.modules) or []
try:
    AutoModelForCausalLM.from_pretrained('nowhere', tp_plan='auto')
except OSError:  # there is no such model
    pass
assert seen == [False] and 'transformers.modeling_utils' in sys.modules
"""


def test_reads_begin_before_models_are_imported() -> None:
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", BEFORE_MODELS], check=True, timeout=120, env=offline)
