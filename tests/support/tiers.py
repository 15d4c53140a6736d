"""Two tiers of tests: `make test` leaves out those marked slow, `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def wide(cases: Iterable[Any], quick: int) -> list[Any]:
    """Cases of a parametrization; those after the first `quick` are slow: they are more of the same kind."""
    return _tiers(cases, lambda index: index < quick)


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Cases of a parametrization; all but one of `every` are slow: they are more of the same kinds."""
    return _tiers(cases, lambda index: index % every == 0)


def _tiers(cases: Iterable[Any], is_quick: Callable[[int], bool]) -> list[Any]:
    found = []
    for index, case in enumerate(cases):
        values, marks, name = (case.values, case.marks, case.id) if hasattr(case, "marks") else (case, (), None)
        if not isinstance(values, tuple):
            values = (values,)
        found.append(pytest.param(*values, marks=marks if is_quick(index) else (*marks, pytest.mark.slow), id=name))
    return found
