"""Waits of tests for what processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 120.0, said: Callable[[], object] = lambda: "") -> None:
    """Wait until `condition()` is true; AssertionError with `said()` if it is not after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, said()
        time.sleep(0.1)
