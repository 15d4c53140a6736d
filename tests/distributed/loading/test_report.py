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

pytestmark = pytest.mark.distributed


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
def test_the_report_adds_up(pool: Any, cases: Any, size: int) -> None:
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


def map_and_train(folder: str, sharded: str) -> dict[str, Any]:
    """Load with maps, change what was loaded in place, and save it over the files that it stands in."""
    before = files_of(folder)
    model = load(folder)
    result = {"report": model.tp_report, "read": bytes_read(model), "held": held(model), "headers": headers(folder)}
    result["logits"] = logits_of(model)
    with torch.no_grad():
        doubled = {name: 2 * value for name, value in full_parameters(model).items()}
        for param in model.parameters():
            param.mul_(2)
    result["files stay"] = files_of(folder) == before
    tp_transformers.save_sharded(model, sharded)
    model.save_pretrained(folder)
    loads = (model, load(folder, tp_map=False), load(sharded))
    result["doubled"] = not any(different_tensors(full_parameters(each), doubled) for each in loads)
    whole = load(sharded)
    result["sharded"] = (whole.tp_report.mapped, held(whole))
    return result


@needs("presharded")
@pytest.mark.parametrize("size", wide([3, 2], 1))
def test_parameters_may_live_in_the_files(pool: Any, cases: Any, tmp_path: Path, size: int) -> None:
    case = cases(9, 3)
    folder = shutil.copytree(case.folder, tmp_path / "model")
    for rank in pool.run(size, map_and_train, str(folder), str(tmp_path / "sharded")):
        found = rank["report"]
        assert 0 < found.mapped < rank["held"], "rows stay, columns are copied"
        assert rank["read"] == rank["held"] + rank["headers"]
        assert error_of(rank, case.reference) < 1e-4
        assert rank["files stay"], "a page that is written to is the process' own"
        assert rank["doubled"]
        assert rank["sharded"][0] == rank["sharded"][1], "nothing is copied of shards in files of their own"
