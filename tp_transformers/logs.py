"""Logging of the package, through Python's logging: the loggers below "tp_transformers", with the rank in each record.

Records below WARNING are dropped unless an application asks for them, by `logging.getLogger("tp_transformers")` or by
TP_TRANSFORMERS_VERBOSITY=info in the environment (debug, info, warning, error or critical, as for transformers). One
rank writes the records that are alike on all. Records have the attributes `rank` and `world_size`, and begin with the
former where there are several. Handlers stay the application's: with the variable alone, and no handler anywhere,
stderr is one.
"""

from __future__ import annotations

import logging
import os
import sys

PACKAGE = __name__.partition(".")[0]
VARIABLE = "TP_TRANSFORMERS_VERBOSITY"
_LEVELS = ("debug", "info", "warning", "error", "critical")


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; its records know their rank."""
    logger = logging.getLogger(name)
    if _say_rank not in logger.filters:
        logger.addFilter(_say_rank)
    return logger


def _say_rank(record: logging.LogRecord) -> bool:
    """A filter that lets everything pass; of loggers rather than handlers, so that all handlers see its additions."""
    dist = sys.modules.get("torch.distributed")  # nothing has been initialised where it was not imported
    rank, size = 0, 1
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    vars(record).update(rank=rank, world_size=size)
    if size > 1:
        record.msg = f"[rank {rank}/{size}] {record.msg}"
    return True


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes records that no handler of the application will."""

    def emit(self, record: logging.LogRecord) -> None:
        package = logging.getLogger(PACKAGE)
        if package.handlers == [self] and not (package.propagate and logging.getLogger().handlers):
            super().emit(record)


def read_environment() -> None:
    """Set the level that the environment asks for; without the variable, nothing is touched."""
    asked = os.environ.get(VARIABLE, "").lower()
    if not asked:
        return
    package = get_logger(PACKAGE)
    if asked not in _LEVELS:
        package.warning("%s: got %s, expected one of %s; ignored", VARIABLE, asked, ", ".join(_LEVELS))
        return
    package.setLevel(asked.upper())
    if not package.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(f"{PACKAGE}: %(message)s"))
        package.addHandler(handler)
