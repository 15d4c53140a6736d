"""The line of the user's code that this process is executing, from the stack frames of its threads."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ...errors import shorten

_PACKAGE = __name__.partition(".")[0]
_NOT_CALLS = tuple(f"{_PACKAGE}.{name}" for name in ("patches", "commands", "__main__"))
"""Modules of wrappers around a call; their functions do not name the call."""
_COLLECTIVES = (
    f"{_PACKAGE}.ranks",
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
    "torch.distributed._functional_collectives",
)
"""Modules of the innermost frame of a thread that waits in a collective."""
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = str(Path(__file__).resolve().parents[2])
_NAMES = {
    "__call__": "forward",
    "_compiled": "forward",
    "_backward": "backward",
    "_clip": "clip_grad_norm_",
    "step_of": "an optimizer's step",
}
"""Names to report for entry functions that have other names."""


@dataclass(frozen=True)
class Place:
    """The position of a process in its code."""

    call: str
    """The outermost call of this package: "save_pretrained", "generate", "forward", ...; "" for none."""
    waits: bool
    """True while it waits in a collective, of this package or of the user's code."""
    line: str
    """The innermost line of the user's code: "train.py:12: model.save_pretrained(folder)"."""


def here() -> Place:
    """The position of the main thread, or of another thread if only that waits in a call of this package."""
    frames = {thread: list(_outwards(frame)) for thread, frame in sys._current_frames().items()}
    frames.pop(threading.get_ident())
    main = frames.get(threading.main_thread().ident or 0, [])
    waiting = (stack for stack in frames.values() if _waits(stack) and _call(stack))
    thread = main if _call(main) else next(waiting, main)
    return Place(_call(thread), _waits(thread), _line(thread))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _waits(frames: list[FrameType]) -> bool:
    return bool(frames) and _module(frames[0]).startswith(_COLLECTIVES)


def _call(frames: list[FrameType]) -> str:
    for frame in reversed(frames):
        module = _module(frame)
        if module.startswith(f"{_PACKAGE}.") and not module.startswith(_NOT_CALLS):
            return _NAMES.get(name := frame.f_code.co_name, name)
    return ""


def _line(frames: list[FrameType]) -> str:
    """The innermost line outside of all libraries, or else the outermost line."""
    own = (frame for frame in frames if not frame.f_code.co_filename.startswith((*_LIBRARIES, _OWN, "<")))
    frame = next(own, frames[-1] if frames else None)
    if frame is None:
        return "an unknown line"
    file, number = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, number).strip()
    return shorten(f"{os.path.basename(file)}:{number}" + (f": {source}" if source else ""), 120)
