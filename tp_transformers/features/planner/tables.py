"""Tables and lines of a terminal's width."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

PIPED = 120
"""Width of text without a terminal, unless COLUMNS is set."""
_NARROWEST = 12
"""Minimum width of a table column, if words are broken."""


def terminal_width() -> int:
    """Width of the terminal in characters, or COLUMNS if set; PIPED without a terminal."""
    return shutil.get_terminal_size((PIPED, 0)).columns


def fold(line: str, width: int, indent: int) -> list[str]:
    """Wrap a line to `width` characters, with `indent` from the second line on; long words are not broken."""
    return textwrap.wrap(
        line, max(width, indent + 1), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def columns(rows: Sequence[Sequence[str]], *, right: bool = False, width: int | None = None) -> list[str]:
    """Format rows as lines with aligned columns; with `right`, all but the first column are right-aligned.

    If lines are longer than `width`, as few cells as possible are wrapped.
    """
    cells = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in cells]
    words = [max(_indent(cell) + max(map(len, [*cell.split(), ""])) for cell in column) for column in cells]
    for least in (words, [_NARROWEST] * len(words)):  # words are broken last
        while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
            wide = [index for index, most in enumerate(widths) if most > least[index]]
            if not wide:
                break
            # The column in which the fewest cells are wrapped if it is one character narrower.
            folded = {index: sum(len(cell) >= widths[index] for cell in cells[index]) for index in wide}
            widths[min(wide, key=lambda index: (folded[index], -widths[index]))] -= 1
    sides = ["<", *(">" if right else "<") * (len(widths) - 1)]
    lines = []
    for row in rows:
        texts = [_cell(cell, most) for cell, most in zip(row, widths, strict=True)]
        for row_lines in zip_longest(*texts, fillvalue=""):
            line = "  ".join(f"{text:{side}{most}}" for text, side, most in zip(row_lines, sides, widths, strict=True))
            lines.append(line.rstrip())
    return lines


def _cell(cell: str, width: int) -> list[str]:
    """Wrap a cell, keeping its indentation."""
    indent = " " * _indent(cell)
    later = f"{indent}  " if indent else ""
    text = cell.strip()
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=later, break_on_hyphens=False) or [""]


def _indent(cell: str) -> int:
    return len(cell) - len(cell.lstrip())
