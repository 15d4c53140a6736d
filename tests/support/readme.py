"""What tests know of the README: its blocks of code, and its table of architectures, which is made from `model_plans/`.

`python -m tests.support.readme` writes the table into the README.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tp_transformers.plans.listing import catalogue

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- architectures -->\n", "<!-- /architectures -->\n"

COMMON = {"colwise", "colwise_rep", "rowwise", "replicate", "embedding_rowwise"}
"""Strategies that nearly every plan uses, and that say nothing about one."""


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    line: int
    """Where it begins."""
    language: str
    """"python", "sh", "yaml", or "text" for what the block before it prints."""
    code: str

    @property
    def file(self) -> str:
        """The name of a script, which its first line says; else ""."""
        named = re.match(r"# (\w+\.\w+)\n", self.code)
        return named[1] if named else ""


def blocks() -> list[Block]:
    """All of them, in order."""
    text = README.read_text()
    return [
        Block(text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    ]


def table() -> str:
    """One row a plan: its title (the first comment of its file), the model types it is for, what is special in it."""
    rows = [
        "| architecture | `model_type` | plan | beside columns, rows and whole norms |",
        "| --- | --- | --- | --- |",
    ]
    for entry in catalogue():
        types = ", ".join(f"`{model_type}`" for model_type in entry.model_types)
        marks = ", ".join(f"`{name}`" for name in entry.strategies if name not in COMMON) or "-"
        plan = f"[{entry.path.name}](model_plans/{entry.path.name})"
        rows.append(f"| [{entry.title}]({entry.url}) | {types} | {plan} | {marks} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """The README with the table as it should be."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
