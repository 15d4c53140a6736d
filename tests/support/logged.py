"""What is logged while a block runs, on a rank as well, where there is no `caplog`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def logged(
    name: str = "tp_transformers", level: int = logging.NOTSET, then: Callable[[], Any] = lambda: None
) -> Iterator[list[str]]:
    """The messages of the logger `name` in the block, of `level` on if it is given; `then` is called after each."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: (messages.append(record.getMessage()), then())  # type: ignore
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level or before)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
