"""What the tests share: the pool of ranks, and checkpoints made once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils import logging

from .models import Case, make_case
from .pool import Pool

logging.disable_progress_bar()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for distributed cases."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory):
    """`cases(heads, kv_heads, **config)` is a tiny Llama checkpoint with its one-process reference, made once."""
    made: dict[object, Case] = {}

    def make(heads: int, kv_heads: int, **config: object) -> Case:
        key = (heads, kv_heads, tuple(sorted(config.items())))
        if key not in made:
            folder: Path = tmp_path_factory.mktemp(f"llama-{heads}-{kv_heads}")
            made[key] = make_case(folder, heads, kv_heads, **config)
        return made[key]

    return make


def pytest_report_header() -> str:
    """Which versions a run is of."""
    return f"torch {torch.__version__}, transformers {transformers.__version__}"
