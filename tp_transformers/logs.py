"""Logging of the package: Python loggers below "tp_transformers", with the rank in each record.

The default level is WARNING. An application changes it by `logging.getLogger("tp_transformers")`, or by
TP_TRANSFORMERS_VERBOSITY=info in the environment (debug, info, warning, error or critical, as for transformers). One
rank logs the records that are equal on all. Records have the attributes `rank` and `world_size`, and begin with the
rank if there are several. The application sets the handlers; if there is none and the variable is set, records go to
stderr.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

PACKAGE = __name__.partition(".")[0]
VARIABLE = "TP_TRANSFORMERS_VERBOSITY"
_LEVELS = ("debug", "info", "warning", "error", "critical")


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; adds the rank to its records."""
    logger = logging.getLogger(name)
    if _add_rank not in logger.filters:
        logger.addFilter(_add_rank)
    return logger


@cache
def warn_once(logger: logging.Logger, text: str) -> None:
    """Log a warning that this process has not logged yet."""
    logger.warning(text)


def _add_rank(record: logging.LogRecord) -> bool:
    """A filter that adds the rank and passes every record; on loggers, so that all handlers see the additions."""
    dist = sys.modules.get("torch.distributed")  # not initialised if it was not imported
    rank, size = 0, 1
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    vars(record).update(rank=rank, world_size=size)
    if size > 1:
        record.msg = f"[rank {rank}/{size}] {record.msg}"
    return True


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes records that have no handler of the application."""

    def emit(self, record: logging.LogRecord) -> None:
        package = logging.getLogger(PACKAGE)
        if package.handlers == [self] and not (package.propagate and logging.getLogger().handlers):
            super().emit(record)


def read_environment() -> None:
    """Set the level from the environment variable; no-op without it."""
    level = os.environ.get(VARIABLE, "").lower()
    if not level:
        return
    package = get_logger(PACKAGE)
    if level not in _LEVELS:
        package.warning("%s: got %s, expected one of %s; ignored", VARIABLE, level, ", ".join(_LEVELS))
        return
    package.setLevel(level.upper())
    if not package.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(f"{PACKAGE}: %(message)s"))
        package.addHandler(handler)
