"""The way of a forward and of a load through the files of the package: `python tests/support/traces.py` prints JSON.

`tests.support.figures` runs it in the checkout that it measures, with the package and the tests of that checkout.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

import tp_transformers
from tests.support.models import PROMPTS, load, make_case
from tests.support.pool import Pool
from tp_transformers.loading import from_pretrained
from tp_transformers.loading import load as loading

ROOT = str(Path(tp_transformers.__file__).parent) + "/"

Lines = dict[str, list[int]]
"""File of the package -> its lines that were executed."""


def executed(function: Callable[[], object], begins: Callable[[FrameType], bool]) -> Lines:
    """Lines of the package that run while a frame for which `begins` is true is on the stack of `function()`."""
    found: dict[str, set[int]] = {}
    outermost: list[FrameType] = []

    def inside(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and outermost and frame.f_code.co_filename.startswith(ROOT):
            found.setdefault(frame.f_code.co_filename.removeprefix(ROOT), set()).add(frame.f_lineno)
        elif event == "return" and outermost == [frame]:
            outermost.clear()
        return inside

    def called(frame: FrameType, event: str, arg: object) -> Any:
        if not outermost and begins(frame):
            outermost.append(frame)
            return inside
        return inside if outermost and frame.f_code.co_filename.startswith(ROOT) else None

    sys.settrace(called)
    try:
        function()
    finally:
        sys.settrace(None)
    return {name: sorted(lines) for name, lines in sorted(found.items())}


def forwards(folder: str) -> dict[str, Lines]:
    """Runs on every rank: the lines of one forward of a column-parallel `q_proj`, within a forward of the model."""
    model = load(folder)
    q_proj = model.model.layers[1].self_attn.q_proj
    call = nn.Module.__call__.__code__

    def is_q_proj(frame: FrameType) -> bool:
        return frame.f_code is call and frame.f_locals.get("self") is q_proj

    def infer() -> None:
        with torch.no_grad():
            model(PROMPTS)

    def train() -> None:
        model(PROMPTS, labels=PROMPTS)

    def alone() -> None:
        q_proj(torch.ones(1, 2, q_proj.in_features, requires_grad=True)).sum().backward()

    ways: dict[str, tuple[Callable[[], None], Callable[[FrameType], bool]]] = {
        "inference": (infer, is_q_proj),
        "training": (train, is_q_proj),
        "training, alone, with its backward": (alone, lambda frame: frame.f_code is alone.__code__),
    }
    found = {}
    for name, (function, begins) in ways.items():
        model.train(name != "inference")
        function()  # what is made once is left out
        found[name] = executed(function, begins)
    return found


def journey(function: Callable[[], object], begins: CodeType) -> list[tuple[str, str]]:
    """(file, function) of the package in the order of the calls, while a frame of `begins` is on the stack."""
    visited: list[tuple[str, str]] = []
    outermost: list[FrameType] = []

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "return" and outermost == [frame]:
            outermost.clear()
        elif event == "call":
            if not outermost and frame.f_code is begins:
                outermost.append(frame)
            if outermost and (code := frame.f_code).co_filename.startswith(ROOT):
                visited.append((code.co_filename.removeprefix(ROOT), f"{code.co_name}:{code.co_firstlineno}"))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return [call for call, _ in groupby(visited)]


def main() -> None:
    """Print the lines of the forwards of both ranks, and the journeys of a load, as JSON."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_case(Path(folder), 9, 3).folder
        pool = Pool()
        try:
            lines = pool.run(2, forwards, checkpoint)
        finally:
            pool.close()
        load(checkpoint)  # imports come before
        journeys = {
            function.__name__: journey(lambda: load(checkpoint), inspect.unwrap(function).__code__)
            for function in (from_pretrained.load_pretrained_model, loading.load)
        }
    print(json.dumps({"forwards": lines[0], "journeys": journeys}))


if __name__ == "__main__":
    main()
