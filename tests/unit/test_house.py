"""Core and features: imports between them, and their lines, which only go down."""

from __future__ import annotations

import pytest

from tests.support.house import House
from tests.support.needs import of_others
from tp_transformers.seams import added

CORE = 12500
"""Lines of the core. A change that raises this number says in its commit what it took out."""
PACKAGE = 45287
"""Lines of the package, likewise."""
FROM_CORE = 0
"""Imports of features by the core. A change that removes one lowers this number; none raises it."""
BETWEEN_FEATURES = 0
"""Imports of one feature by another that does not require it, likewise."""
NEEDED_BY_TESTS = 71
"""(file of the tests, feature) pairs where the feature neither has the tests nor is required by the one that has."""


@pytest.fixture(scope="module")
def house() -> House:
    return House()


def test_features_name_modules_that_exist(house) -> None:
    assert not house.unknown


@pytest.mark.parametrize(
    "kind", ["sections", "storages", "encodings", "holdings", "clients", "model_methods", "model_patches"]
)
def test_what_features_name_exists(kind) -> None:
    assert added(kind)


def test_imports_of_features_only_go_away(house) -> None:
    assert len(house.from_core) == FROM_CORE, house.from_core
    assert len(house.between_features) == BETWEEN_FEATURES, house.between_features


def test_tests_need_fewer_features_of_others() -> None:
    assert len(found := of_others()) <= NEEDED_BY_TESTS, found


def test_lines_stay_within_their_budgets(house) -> None:
    print(house.figures())
    assert house.lines() <= CORE
    assert sum(house.imports.lines.values()) <= PACKAGE
