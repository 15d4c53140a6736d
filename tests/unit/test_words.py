"""Docstrings and comments name the thing, then its property."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import tp_transformers

ROOT = Path(tp_transformers.__file__).parent

LIMIT = 0.05
"""Share of sentences that may begin otherwise."""

OPENINGS = ("What", "Which", "Whether", "Of", "Where", "That", "Whom", "Whose", "Whoever", "Whatever", "Whichever")
"""First words of sentences that name no thing."""

INDIRECT = re.compile(
    r"\b(?:what|whose|(?:after|along|around|at|before|by|for|from|in|of|on|to|with) which)\b", re.IGNORECASE
)
"""Words of clauses that a noun says more plainly; 1.4% of torchtitan's sentences have one."""

MOST_INDIRECT = 0.04
"""Share of sentences that may have one."""

DIALECT = ("as ever", "is told", "are told", "told apart", "stands there", "comes into its own")
"""Phrases for which the field has words of its own."""


def sentences(text: str) -> Iterator[str]:
    """Sentences of prose; blocks of code, drawings and tables are left out."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
        prose = " ".join(lines)
        if not re.search(r"[a-z]{3}", prose) or re.search(r"──|->|→|^\||>>>", prose):
            continue
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"])|(?<=:)\s+(?=[A-Z])", prose):
            yield re.sub(r"^[a-z_]+(\[.*?\])?: ", "", sentence.strip("# "))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, of modules, classes, functions and fields, and of every comment."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|pragma)", token.string):
            yield token.start[0], token.string.lstrip("# ")


def check(is_fault: Callable[[str], object], limit: float) -> None:
    """Print the sentences that are faults, and fail where their share is above the limit."""
    found, faults = 0, []
    for path in sorted(ROOT.rglob("*.py")):
        for line, text in texts(path):
            for sentence in sentences(text):
                found += 1
                if is_fault(sentence):
                    faults.append(f"{path.relative_to(ROOT)}:{line}: {sentence[:100]}")
    share = len(faults) / found
    print(*faults, sep="\n")
    assert share <= limit, f"{len(faults)} of {found} sentences ({share:.1%})"


def begins_indirectly(sentence: str) -> bool:
    opening = re.split(r"\W", sentence, maxsplit=1)[0].capitalize()
    return opening in OPENINGS or any(phrase in sentence for phrase in DIALECT)


def test_sentences_name_a_thing_first() -> None:
    check(begins_indirectly, LIMIT)


def test_sentences_name_a_thing_throughout() -> None:
    check(lambda sentence: INDIRECT.search(re.sub("`[^`]*`", "", sentence)), MOST_INDIRECT)
