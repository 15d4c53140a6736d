"""What is said, at which level, and by whom."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tp_transformers import logs


@pytest.fixture
def package() -> Iterator[logging.Logger]:
    """The package's logger, put back afterwards."""
    logger = logging.getLogger("tp_transformers")
    level, handlers, filters = logger.level, logger.handlers[:], logger.filters[:]
    yield logger
    logger.setLevel(level)
    logger.handlers[:], logger.filters[:] = handlers, filters


def test_records_know_their_rank(package, monkeypatch) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    package.addHandler(handler)
    logger = logs.get_logger("tp_transformers.some.room")
    assert logs.get_logger("tp_transformers.some.room") is logger
    logger.warning("alone, %d%%", 50)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    logger.warning("one of several, %d%%", 50)
    assert [record.getMessage() for record in records] == ["alone, 50%", "[rank 1/3] one of several, 50%"]
    assert [(record.rank, record.world_size) for record in records] == [(0, 1), (1, 3)]  # type: ignore[attr-defined]


def test_the_environment_sets_the_level(package, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    logger = logs.get_logger("tp_transformers.some.room")
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    logs.read_environment()
    assert (package.level, package.handlers) == (logging.NOTSET, [])
    logger.info("not said")
    monkeypatch.setenv(logs.VARIABLE, "INFO")
    for _ in range(2):
        logs.read_environment()
    logger.info("said")
    logger.debug("not said")
    assert stderr.getvalue() == "tp_transformers: said\n"
    # An application's handler takes over.
    theirs = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(theirs)
    logger.warning("said once")
    assert theirs.stream.getvalue() == "said once\n"
    assert stderr.getvalue() == "tp_transformers: said\n"
    monkeypatch.setenv(logs.VARIABLE, "loud")
    logs.read_environment()
    assert theirs.stream.getvalue().endswith(
        "got loud, expected one of debug, info, warning, error, critical; ignored\n"
    )
    assert package.level == logging.INFO
