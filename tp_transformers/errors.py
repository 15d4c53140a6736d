"""The errors that this package raises for what a user can mend.

A message says what it is about, what was found, what was expected, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TensorParallelError(Exception):
    """Base of all errors raised by tp_transformers."""

    def __init__(self, subject: str, *, got: str | None = None, expected: str = "", fix: str = "") -> None:
        """A message in its usual form: subject, got, expected, what to do; without `got`, the subject is all of it."""
        super().__init__(subject if got is None else describe(subject, got=got, expected=expected, fix=fix))


class PlanError(TensorParallelError, ValueError):
    """A plan does not fit the model; the message lists every fault at once."""


class MeshError(TensorParallelError, ValueError):
    """The ranks, devices or DeviceMesh do not fit what was asked for."""


class CheckpointError(TensorParallelError, OSError):
    """A checkpoint file is missing, truncated, malformed or of the wrong shape."""


class UnsupportedError(TensorParallelError, NotImplementedError):
    """The request is understood but cannot be served."""


class RemoteRankError(TensorParallelError, RuntimeError):
    """Another rank failed; this one stopped with it."""


class UsageError(TensorParallelError, ValueError):
    """An argument of a command is not one that it can serve."""


def describe(subject: str, *, got: str, expected: str, fix: str) -> str:
    """Return a message in its usual form: subject, got, expected, what to do."""
    return f"{subject}: got {got}, expected {expected}. {fix}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return " (nearest: a, b, c)" for the valid names closest to `name`, or ""."""
    matches = difflib.get_close_matches(name, sorted(set(valid)), n=3, cutoff=0.5)
    return f" (nearest: {', '.join(matches)})" if matches else ""


def list_faults(title: str, faults: Iterable[str]) -> str:
    """Return one message of all `faults`, each told once."""
    lines = sorted(set(faults))
    count = f"{len(lines)} fault" + "s" * (len(lines) > 1)
    return f"{title}, {count}:" + "".join(f"\n  - {line}" for line in lines)
