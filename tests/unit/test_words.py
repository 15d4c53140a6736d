"""Docstrings and comments name the thing, then its property."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import tp_transformers
from tests.support.words import faults, is_indirect

ROOT = Path(tp_transformers.__file__).parent

LIMIT = 0.05
"""Share of sentences that may begin otherwise."""

OPENINGS = ("What", "Which", "Whether", "Of", "Where", "That", "Whom", "Whose", "Whoever", "Whatever", "Whichever")
"""First words of sentences that name no thing."""

MOST_INDIRECT = 0.04
"""Share of sentences that may have one."""

DIALECT = ("as ever", "is told", "are told", "told apart", "stands there", "comes into its own")
"""Phrases for which the field has words of its own."""


def check(is_fault: Callable[[str], bool], limit: float) -> None:
    """Print the sentences that are faults, and fail where their share is above the limit."""
    found, count = faults(ROOT, is_fault)
    share = len(found) / count
    print(*found, sep="\n")
    assert share <= limit, f"{len(found)} of {count} sentences ({share:.1%})"


def begins_indirectly(sentence: str) -> bool:
    opening = re.split(r"\W", sentence, maxsplit=1)[0].capitalize()
    return opening in OPENINGS or any(phrase in sentence for phrase in DIALECT)


def test_sentences_name_a_thing_first() -> None:
    check(begins_indirectly, LIMIT)


def test_sentences_name_a_thing_throughout() -> None:
    check(is_indirect, MOST_INDIRECT)
