"""Sizes, ranges of integers and tables as text; names that are paths."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest


def is_path(name: str) -> bool:
    """True if `name` cannot be the name of a model on the Hub."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def size(nbytes: int) -> str:
    """Format a number of bytes, in units of 1000."""
    for unit, scale, digits in (("GB", 10**9, 2), ("MB", 10**6, 1)):
        if nbytes >= scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes / 1000:.1f} kB" if nbytes else "0"


def spans(numbers: Iterable[int]) -> str:
    """Format integers, with consecutive ones as a range: 0-3, 7."""
    groups = [
        [number for _, number in group]
        for _, group in groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])
    ]
    return ", ".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)


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
