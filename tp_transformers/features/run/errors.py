"""Errors of ranks, written to files, so that an error of several ranks is printed once."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from ...commands import REFUSED
from ...errors import RemoteRankError, error_text, spans

FOLDER = "TP_TRANSFORMERS_ERRORS"
"""Environment variable with the folder of errors; without it, each rank prints its own error."""
_CODES = "codes.json"
_PROGRAMS = (Path(__file__).with_name("rank.py"), Path(__file__).parents[2] / "__main__.py")
_OURS = {runpy.__file__, "<frozen runpy>", *map(str, _PROGRAMS), __file__}
"""Files with frames between the interpreter and the script, which tracebacks leave out."""


@contextmanager
def keep_errors(*refusals: type[Exception]) -> Iterator[None]:
    """Write an error that ends this rank to a file instead of stderr, if the launcher has set FOLDER.

    Args:
        refusals: classes of errors that need no traceback; the rank ends with exit code 2.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        yield
        return

    def keep(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _OURS:
            trace = trace.tb_next
        try:
            _write(folder, error_text(error), "".join(traceback.format_exception(kind, error, trace)))
        except OSError:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = keep  # not restored: it is called after this block
    try:
        yield
    except refusals as refused:
        _write(folder, error_text(refused), "")
        raise SystemExit(REFUSED) from None
    except SystemExit as ended:
        if not isinstance(ended.code, str):
            raise
        _write(folder, ended.code, f"{ended.code}\n")
        raise SystemExit(1) from None


def _write(folder: str, text: str, trace: str) -> None:
    path = Path(folder, f"{os.environ.get('RANK', '0')}.part")
    path.write_text(json.dumps([text, trace]), encoding="utf-8")
    path.replace(path.with_suffix(".rank"))


def keep_codes(codes: Mapping[int, int]) -> None:
    """Write the exit codes of the ranks that failed first; negative for signals."""
    Path(os.environ[FOLDER], _CODES).write_text(json.dumps(dict(codes)), encoding="utf-8")


def error_lines(folder: Path, command: str) -> Iterator[str]:
    """Lines about the errors in a folder: a traceback of the first rank that failed by itself, and a line per error."""
    errors = {int(path.stem): json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.rank"))}
    codes = folder / _CODES
    ended: dict[Any, int] = json.loads(codes.read_text()) if codes.exists() else {}
    ranks_by_text: dict[str, list[int]] = {}
    for rank in sorted(errors):
        ranks_by_text.setdefault(errors[rank][0], []).append(rank)
    own = {text: ranks for text, ranks in ranks_by_text.items() if not text.startswith(f"{RemoteRankError.__name__}: ")}
    subject = f"tp-transformers {command}"
    is_traced = False
    for text, ranks in (own or ranks_by_text).items():
        trace = errors[ranks[0]][1].rstrip()
        if not trace:
            yield f"{subject}: {text.partition(': ')[2]}"
            continue
        if not is_traced:
            yield trace
        label = "this error" if not is_traced else text.splitlines()[0] if text else "an error"
        yield f"{subject}: {_ranks(ranks)} ended with {label}"
        is_traced = True
    silent: dict[str, list[int]] = {}
    for rank, code in ended.items():
        if int(rank) not in errors and code != -signal.SIGTERM:  # torchrun ends the other ranks with SIGTERM
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            silent.setdefault(how, []).append(int(rank))
    yield from (f"{subject}: {_ranks(sorted(ranks))} ended {how}" for how, ranks in silent.items())
    if len(own or ranks_by_text) > 1 or (errors and silent):
        yield f"{subject}: --verbose prints every rank's own traceback"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"
