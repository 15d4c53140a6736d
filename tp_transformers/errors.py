"""Errors that a user can fix, and the text of messages: sizes, ranges of integers, the nearest names.

A message names its subject, the actual value, the expected value, and the remedy.
"""

from __future__ import annotations

import difflib
import reprlib
import sys
from collections.abc import Iterable, Sized
from itertools import groupby

MOST_FAULTS = 20
"""Most faults that one message lists."""


class TensorParallelError(Exception):
    """Base of all errors raised by tp_transformers."""

    def __init__(self, subject: str, *, got: str | None = None, expected: str = "", fix: str = "") -> None:
        """Formats the message from subject, got, expected and fix; without `got`, `subject` is the message."""
        super().__init__(subject if got is None else describe(subject, got=got, expected=expected, fix=fix))


class PlanError(TensorParallelError, ValueError):
    """A plan does not fit the model; the message lists every fault at once."""


class MeshError(TensorParallelError, ValueError):
    """The ranks, devices or DeviceMesh do not fit the request."""


class CheckpointError(TensorParallelError, OSError):
    """A checkpoint file is missing, truncated, malformed or of the wrong shape."""


class UnsupportedError(TensorParallelError, NotImplementedError):
    """The request is understood but not supported."""


class RemoteRankError(TensorParallelError, RuntimeError):
    """Another rank failed, so this rank stopped too."""


class UsageError(TensorParallelError, ValueError):
    """An argument of a command is not valid."""


def lacks(library: str, problem: str, *, subject: str) -> UnsupportedError:
    """The error for a `subject` that needs a private name of `library` which the installed release lacks."""
    fix = f"Install another release of {library}, or a newer tp_transformers."
    return UnsupportedError(subject, got=f"{release(library)}: {problem}", expected="a release that has it", fix=fix)


def release(library: str) -> str:
    """Return the name of an imported library and its version."""
    return f"{library} {getattr(sys.modules.get(library), '__version__', '')}".rstrip()


def describe(subject: str, *, got: str, expected: str, fix: str) -> str:
    """Format a message from subject, got, expected and fix."""
    return f"{subject}: got {got}, expected {expected}. {fix}"


def error_text(error: BaseException) -> str:
    """Return "ErrorType: message". The `__str__` of other libraries' errors may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}: (without a message: its str() fails)"


def in_one_line(error: BaseException) -> str:
    """The complete `error_text`, of as many lines as it has, in one of at most 500 characters."""
    return shorten(" ".join(error_text(error).split()), 500)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return " (nearest: a, b, c)" for the valid names closest to `name`, or ""."""
    matches = difflib.get_close_matches(name, sorted(set(valid)), n=3, cutoff=0.5)
    return f" (nearest: {', '.join(matches)})" if matches else ""


def hint_for(faults: Sized, name: str, valid: Iterable[str]) -> str:
    """As `nearest`, but "" once there are as many faults as a message lists: the search takes time."""
    return nearest(name, valid) if len(faults) < MOST_FAULTS else ""


def list_faults(title: str, faults: Iterable[str], *, most: int = MOST_FAULTS) -> str:
    """Return one message with the distinct `faults`, at most the first `most`."""
    lines = sorted(set(faults))
    count = f"{len(lines)} fault" + "s" * (len(lines) > 1)
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return f"{title}, {count}:" + "".join(f"\n  - {line}" for line in lines[:most] + more)


def shorten(text: str, length: int) -> str:
    """Return `text` with at most `length` characters; the middle of a longer text is left out."""
    return text if len(text) <= length else f"{text[: length - length // 2 - 3]}...{text[len(text) - length // 2 :]}"


def shown(value: object) -> str:
    """Return the `repr` of a value of any size and depth, in at most 80 characters and bounded time."""
    return shorten(_REPR.repr(value), 80)


class _Repr(reprlib.Repr):
    """Limits entries and levels; a YAML list of aliases of lists of aliases may have billions."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 4
        self.maxstring = self.maxother = 70

    def repr_int(self, value: int, level: int) -> str:
        """As `repr`, except for numbers that are too long for Python to print."""
        return super().repr_int(value, level) if value.bit_length() < 1000 else f"a number of {value.bit_length()} bits"


_REPR = _Repr()


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
