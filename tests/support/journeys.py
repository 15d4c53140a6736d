"""The ways of a load through the packages of the core: `python -m tests.support.journeys` prints a line for each."""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from types import CodeType, FrameType

import tp_transformers
from tests.support.models import load, make_case
from tp_transformers.loading import from_pretrained
from tp_transformers.loading import load as loading

ROOT = str(Path(tp_transformers.__file__).parent) + "/"
FLOORS = ("slices", "ranks", "anatomy", "strategies", "plans", "checkpoint", "model", "loading")
"""Packages of the core, bottom to top."""


def floor_of(code: CodeType) -> int:
    """Index in FLOORS of the package of a function; -1 for a function elsewhere."""
    package = code.co_filename.removeprefix(ROOT).partition("/")[0]
    return FLOORS.index(package) if code.co_filename.startswith(ROOT) and package in FLOORS else -1


def journey(function: Callable[[], object], begins: CodeType) -> str:
    """Follow `function()` while a frame of `begins` is on the stack; a function of the core counts once."""
    stack: list[tuple[FrameType, CodeType]] = []
    calls: dict[CodeType, None] = {}
    climbs: set[tuple[CodeType, CodeType]] = set()

    def profile(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and (stack or code is begins) and floor_of(code) >= 0:
            if stack and floor_of(stack[-1][1]) < floor_of(code):
                climbs.add((stack[-1][1], code))
            stack.append((frame, code))
            calls.setdefault(code)
        elif event == "return" and stack and stack[-1][0] is frame:
            stack.pop()

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    stays = [floor for floor, _ in groupby(map(floor_of, calls))]
    ups = sum(before < after for before, after in pairwise(stays))
    ways = f"{len(calls)} functions, {len(stays)} stays in {len(set(stays))} packages"
    return f"{ways}, {ups} of them above the one before; {len(climbs)} calls of a higher package by a lower one"


def journeys() -> dict[str, str]:
    """{function: the way through it} of the load of a tiny Llama in one process."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_case(Path(folder), 9, 3).folder
        load(checkpoint)  # imports come before
        functions = (from_pretrained.load_pretrained_model, loading.load)
        codes = {each.__name__: inspect.unwrap(each).__code__ for each in functions}
        return {name: journey(lambda: load(checkpoint), code) for name, code in codes.items()}


if __name__ == "__main__":
    for name, way in journeys().items():
        print(f"{name}: {way}")
