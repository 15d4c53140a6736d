"""Docstrings and comments name the thing, then its property."""

from __future__ import annotations

import ast
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

DIALECT = re.compile(
    r"\b(?:whole|cuts?|told|tells?|alike|portion|box(?:es)?|hull|settles?|mends?|tangled|farewell|stands for)\b",
    re.IGNORECASE,
)
"""Words for which the field has its own: unsharded or replicated, sharded or split, reports, identical, block."""

MOST_DIALECT = 0.005
"""Share of sentences that may have one."""

DIALECT_NAMES = re.compile(
    r"(?:^|_)(?:cuts?|wholes?|pieces?|portions?|told|tells|settles?|mends?|outlines?|alike|hull|members?|express(?:ed)?)(?:_|$)"
)
"""The same words in names, and those that are vague there."""

NAMES_OF_OTHERS = {"model/nnsight.py: whole"}
"""Methods that another library calls."""


def check(is_fault: Callable[[str], bool], limit: float) -> None:
    """Print the sentences that are faults, and fail where their share is above the limit."""
    found, count = faults(ROOT, is_fault)
    share = len(found) / count
    print(*found, sep="\n")
    assert share <= limit, f"{len(found)} of {count} sentences ({share:.1%})"


def begins_indirectly(sentence: str) -> bool:
    return re.split(r"\W", sentence, maxsplit=1)[0].capitalize() in OPENINGS


def is_dialect(sentence: str) -> bool:
    return DIALECT.search(re.sub("`[^`]*`", "", sentence)) is not None


def test_sentences_name_a_thing_first() -> None:
    check(begins_indirectly, LIMIT)


def test_sentences_name_a_thing_throughout() -> None:
    check(is_indirect, MOST_INDIRECT)


def test_sentences_have_the_words_of_the_field() -> None:
    check(is_dialect, MOST_DIALECT)


def test_names_have_the_words_of_the_field() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
            name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else name
            if isinstance(name, str) and DIALECT_NAMES.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()):
                found.append(f"{path.relative_to(ROOT)}: {name}")
    assert set(found) <= NAMES_OF_OTHERS
