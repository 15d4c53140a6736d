"""The line of the user's code that this process is executing, from the stack frames of its threads, and the error for
ranks that execute different ones.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...errors import MeshError, shorten

_PACKAGE = __name__.partition(".")[0]
_NOT_CALLS = tuple(f"{_PACKAGE}.{name}" for name in ("patches", "seams", "commands", "__main__"))
"""Modules of wrappers around a call; their functions do not name the call."""
_COLLECTIVES = (
    f"{_PACKAGE}.ranks",
    f"{_PACKAGE}.features.shared_memory",
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
    "torch.distributed._functional_collectives",
)
"""Modules of the innermost frame of a thread that waits in a collective."""
_AVERAGES = (f"{_PACKAGE}.features.data_parallel.averaging",)
"""The same while it waits for other copies of the model."""
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_INTERVAL = 0.25
"""Seconds after which Python lets another thread run while stacks are read, which takes a few milliseconds."""
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


def here(*, for_copies: bool = False) -> Place:
    """The position of the main thread, or of another thread if only that waits in a call of this package.

    `for_copies`: whether only the averages over copies of a model count as collectives.
    """
    stacks = _stacks()
    main = stacks.get(threading.main_thread().ident or 0, [])
    modules = _AVERAGES if for_copies else _COLLECTIVES
    waiting = (stack for stack in stacks.values() if _waits(stack, modules) and _call(stack))
    thread = main if _call(main) else next(waiting, main)
    return Place(_call(thread), _waits(thread, modules), _line(thread))


def inputs_of_this_thread() -> list[str]:
    """The tensors that the outermost module is called with: ["ids int64 (2, 6)", ...]; none outside of modules."""
    inputs: dict[str, Any] = {}
    for frame in _outwards(sys._getframe(1)):
        module = frame.f_locals.get("self") if frame.f_code.co_name in ("_call_impl", "__call__") else None
        if isinstance(module, nn.Module) and {"args", "kwargs"} <= frame.f_locals.keys():
            inputs = named_inputs(module, frame.f_locals["args"], frame.f_locals["kwargs"])
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return [f"{name} {str(value.dtype)[6:]} {tuple(value.shape)}" for name, value in tensors.items()]


def named_inputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a call of `module` by the names of its parameters."""
    names = list(inspect.signature(module.forward).parameters)
    return {**{names[at] if at < len(names) else str(at): value for at, value in enumerate(args)}, **kwargs}


class _Frame(NamedTuple):
    """What is read of a stack frame."""

    module: str
    function: str
    file: str
    line: int


def _stacks() -> dict[int, list[_Frame]]:
    """The frames of every other thread, from the innermost outwards.

    No other thread runs meanwhile, and none finds its frames in use when it goes on: torch.compile, which evaluates
    frames by itself, crashed when frames ended that another thread was reading.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_INTERVAL)
    try:
        time.sleep(0)  # a thread that waits already would wait for the former interval
        tops = sys._current_frames()
        tops.pop(threading.get_ident())
        stacks = {thread: list(map(_read, _outwards(tops[thread]))) for thread in tops}
        tops.clear()
        return stacks
    finally:
        sys.setswitchinterval(interval)


def _read(frame: FrameType) -> _Frame:
    code = frame.f_code
    return _Frame(str(frame.f_globals.get("__name__", "")), code.co_name, code.co_filename, frame.f_lineno)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(frames: list[_Frame], modules: tuple[str, ...]) -> bool:
    return bool(frames) and frames[0].module.startswith(modules)


def _call(frames: list[_Frame]) -> str:
    """The outermost call of this package, or of the library that calls a private function of this package."""
    library = ""
    for frame in reversed(frames):
        if frame.module.startswith(f"{_PACKAGE}.") and not frame.module.startswith(_NOT_CALLS):
            name = _NAMES.get(frame.function, frame.function)
            return library if library and name.startswith("_") else name
        if not frame.file.startswith(_OWN):
            library = (library or frame.function) if frame.file.startswith(_LIBRARIES) else ""
    return ""


def _line(frames: list[_Frame]) -> str:
    """The innermost line outside of all libraries, or else the outermost line."""
    own = (frame for frame in frames if not frame.file.startswith((*_LIBRARIES, _OWN, "<")))
    frame = next(own, frames[-1] if frames else None)
    if frame is None:
        return "an unknown line"
    source = linecache.getline(frame.file, frame.line).strip()
    return shorten(f"{os.path.basename(frame.file)}:{frame.line}" + (f": {source}" if source else ""), 120)


def this_collective(kind: str, x: object) -> str:
    """The collective of `x` that this thread has begun: "all_reduce of float32 (2, 6, 48) in forward (...)"."""
    name = f"{kind} of {str(x.dtype)[6:]} {tuple(x.shape)}" if isinstance(x, Tensor) else "a vote"
    return f"{name} in {this_call()}"


def this_call() -> str:
    """The call of this package that this thread makes: "forward (train.py:12: model(ids)) with ids int64 (2, 6)"."""
    stack, inputs = [_read(frame) for frame in _outwards(sys._getframe(1))], inputs_of_this_thread()
    call, line = _call(stack), _line(stack)
    where = f"{call} ({line})" if call else line
    return where + f" with {', '.join(inputs)}" * bool(inputs)


def out_of_step(texts: Sequence[str]) -> MeshError:
    """The error of ranks in different collectives or calls. `texts`: that of each rank."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    return MeshError(
        "the ranks of a model",
        got="; ".join(f"{text} on rank {' and '.join(names)}" for text, names in ranks.items()),
        expected="the same on all of them",
        fix="Give all ranks of a model the same inputs, of one size, length and dtype, and call it equally often: "
        "DistributedSampler(dataset, num_replicas=dp_size, rank=dp_rank); batches of their own need a dp axis.",
    )
