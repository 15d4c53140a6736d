"""Warnings, once a process, about a forgotten step of a launch: `enable()`, torchrun, or `tp_plan`."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

from ..logs import get_logger, warn_once
from ..ranks.environment import launcher

logger = get_logger(__name__)

CALLED: set[str] = set()
"""What this process has called: "enable", "disable", "script" (a script by `__main__`, which calls `enable`)."""


def warn_of_one_rank() -> None:
    """Warn that one process without a launcher holds the full model."""
    warn_once(
        logger,
        "tp_plan in one process, which holds the full model: launch N ranks with `tp-transformers run -n N script.py` "
        "or `torchrun --nproc-per-node N script.py`, or pass tp_size=1 where one process is meant",
    )


def warn_of_size_alone(tp_size: Any) -> None:
    """Warn that `tp_size` without `tp_plan` selects transformers' own tensor parallelism."""
    if tp_size not in (None, 1) and _is_first():
        warn_once(
            logger,
            f"tp_size={tp_size} without tp_plan loads by transformers' own tensor parallelism: "
            'pass tp_plan="auto" to load by tp_transformers, or first call tp_transformers.disable() where '
            "transformers' tensor parallelism is meant",
        )


def warn_of_full_copies() -> None:
    """Warn that ranks of `tp-transformers run script.py` or `-m tp_transformers script.py` load without `tp_plan`."""
    launch = launcher()
    size = "1" if launch is None else os.environ[launch.size]
    if "script" in CALLED and int(size) > 1 and _is_first():
        text = f"from_pretrained without tp_plan: each of {size} ranks loads the full model"
        warn_once(logger, f'{text}: pass tp_plan="auto" for shards')


def warn_of_no_hook() -> None:
    """Warn at the end of a process if transformers itself sharded a model and `enable()` was never called.

    This cannot happen at the load: nothing of transformers is changed before `enable()`.
    """
    if CALLED or launcher() is None or not _is_first():
        return
    kind = sys.modules["transformers.modeling_utils"].PreTrainedModel
    models = (candidate for candidate in gc.get_objects() if issubclass(type(candidate), kind))
    if any((getattr(model, "_tp_size", None) or 1) > 1 for model in models):
        logger.warning(
            "tp_transformers was imported, but a model was sharded by transformers' own tensor parallelism: call "
            "tp_transformers.enable() before from_pretrained, or launch with `tp-transformers run -n N script.py`"
        )


def _is_first() -> bool:
    """True on rank 0, and without a launcher."""
    launch = launcher()
    return launch is None or os.environ[launch.rank] == "0"
