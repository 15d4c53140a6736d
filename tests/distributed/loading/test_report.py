"""The report of a load: bytes, reads, and mapped files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tp_transformers
from tests.support.comparisons import different_tensors, full_parameters, relative
from tests.support.models import bytes_read, headers, held, load, logits_of
from tests.support.needs import needs
from tests.support.tiers import wide


def report(folder: str, how: bool | None, evict: bool) -> dict[str, Any]:
    if evict:
        for path in Path(folder).glob("*.safetensors"):
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    model = load(folder, tp_prefetch=how)
    logits = logits_of(model)
    report = model.tp_report
    return {
        "report": report,
        "read": bytes_read(model),
        "text": str(report),
        "held": held(model),
        "headers": headers(folder),
        "logits": logits,
    }


def stored_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) - headers(folder)


def error_of(rank: dict[str, Any], reference: str) -> float:
    return relative(rank["logits"], torch.load(reference)["logits"])


@needs("page_cache")
@pytest.mark.parametrize("size", wide([3, 2], 1))
def test_the_report_adds_up(pool, cases, size) -> None:
    case = cases(9, 3)
    ranks = pool.run(size, report, case.folder, False, False)
    for index, rank in enumerate(ranks):
        found = rank["report"]
        assert found.rank == index
        assert found.shares == tuple(other["held"] for other in ranks)
        assert found.share == rank["held"]
        assert sum(nbytes for nbytes, _, _ in found.methods.values()) + found.mapped == rank["held"]
        assert sum(copied for _, copied, _ in found.methods.values()) == found.bytes_read - rank["headers"]
        assert found.reads >= len(found.methods)
        assert 0 < found.reading_seconds <= found.seconds
        assert found.prefetched == 0
        assert found.fallbacks == ()
        assert f"rank {index} of {size}" in rank["text"]


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.safetensors"))}


def map_and_train(folder: str, sharded: str, reference: str) -> None:
    """Run on every rank: load with maps, change what was loaded in place, and save it over the files that it is in."""
    before = files_of(folder)
    model = load(folder)
    assert 0 < model.tp_report.mapped < held(model), "rows stay, columns are copied"
    assert bytes_read(model) == held(model) + headers(folder)
    assert relative(logits_of(model), torch.load(reference)["logits"]) < 1e-4
    with torch.no_grad():
        doubled = {name: 2 * value for name, value in full_parameters(model).items()}
        for param in model.parameters():
            param.mul_(2)
    assert files_of(folder) == before, "a page that is written to is the process' own"
    tp_transformers.save_sharded(model, sharded)
    model.save_pretrained(folder)
    of_shards = load(sharded)
    for each in (model, load(folder, tp_map=False), of_shards):
        assert different_tensors(full_parameters(each), doubled) == []
    assert of_shards.tp_report.mapped == held(of_shards), "nothing is copied of shards in files of their own"


@needs("presharded")
@pytest.mark.parametrize("size", wide([3, 2], 1))
def test_parameters_may_live_in_the_files(pool, cases, tmp_path, size) -> None:
    case = cases(9, 3)
    folder = shutil.copytree(case.folder, tmp_path / "model")
    pool.run(size, map_and_train, str(folder), str(tmp_path / "sharded"), case.reference)
