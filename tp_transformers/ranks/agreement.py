"""Errors that all ranks raise: a mark on them."""

from __future__ import annotations

from typing import TypeVar

from ..marks import Mark

E = TypeVar("E", bound=Exception)

_AGREED: Mark[bool] = Mark("_agreed_on")
"""Mark on an error: all ranks raise it."""


def agreed(error: E) -> E:
    """Mark an error that all ranks raise, so that `TensorParallelGroup.agree` lets it pass without a vote."""
    _AGREED.put(error, True)
    return error


def is_agreed(error: BaseException) -> bool:
    """True if all ranks raise `error`."""
    return bool(_AGREED.find(error))
