"""Two tiers of tests: `make test` leaves out those marked slow, `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def wide(cases: Iterable[Any], quick: int) -> list[Any]:
    """Cases of a parametrization, of which those after the first `quick` are slow: they are more of the same kind."""
    found = []
    for index, case in enumerate(cases):
        values, marks, name = (case.values, case.marks, case.id) if hasattr(case, "marks") else (case, (), None)
        if not isinstance(values, tuple):
            values = (values,)
        found.append(pytest.param(*values, marks=marks if index < quick else (*marks, pytest.mark.slow), id=name))
    return found
