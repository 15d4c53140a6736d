"""What the README says is so."""

from __future__ import annotations

import re

from tests.support.readme import README, with_table
from tp_transformers.strategies import STRATEGIES


def test_the_table_of_architectures_is_made_from_the_plans() -> None:
    text = README.read_text()
    assert with_table(text) == text, "run `python -m tests.support.readme`"


def test_every_strategy_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", README.read_text()))
    assert set(STRATEGIES) <= named
