"""A process of one step: it calls `measure` of the step's module."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from transformers.utils import logging

from ..report import head
from .device import Device, device_of

MORE = "more_"
"""Prefix of the steps with further measurements of a module."""
MARGIN = 3.0
"""Seconds before a step is ended in which it ends the processes that it has started."""


@dataclass(frozen=True)
class Job:
    """The job of one process."""

    step: str
    """Name of the step: of its module, with `more_` before it for further measurements."""
    kind: str
    """Type of the device: "cuda" or "cpu"."""
    rehearses: bool
    """True for small shapes."""
    folder: str
    """Folder for checkpoints."""
    out: str
    """Folder of the results."""
    lines: str
    """File of JSON lines, to which each measurement is appended."""
    until: float
    """Time (`time.time`) at which the process will be ended."""
    devices: int = 1
    """Number of devices."""
    copies: bool = False
    """True if processes that this one starts can be copies of it."""
    backend: str = "gloo"
    """Backend by which ranks on one device communicate."""

    @property
    def is_more(self) -> bool:
        return self.step.startswith(MORE)

    @property
    def left(self) -> float:
        """Seconds until the process will be ended."""
        return self.until - time.time()

    @property
    def device(self) -> Device:
        return device_of(self.kind)


class Lines:
    """The file of a job's measurements, each an object with `what` was measured, and an `error` if that failed."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def write(self, line: dict[str, Any]) -> None:
        """Append one measurement."""
        with open(self.job.lines, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def measure(self, what: str, function: Callable[[], dict[str, Any]], *, needs: float = 0.0) -> dict[str, Any]:
        """Append the numbers of `function`, or its error; if fewer than `needs` seconds are left, that."""
        if self.job.left < needs:
            line: dict[str, Any] = {"what": what, "late": f"{max(self.job.left, 0):.0f} s were left"}
        else:
            began = time.perf_counter()
            try:
                line = {"what": what, **function()}
            except Exception as error:
                traceback.print_exc()
                line = {"what": what, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            line["took"] = round(time.perf_counter() - began, 3)
        self.write(line)
        return line


def table_of(step: str, lines: list[dict[str, Any]]) -> list[str]:
    """Markdown: a table of the numbers of lines with the same fields, then their texts of several lines."""
    if hasattr(module_of(step), "table"):
        return list(module_of(step).table(lines))
    tables: dict[tuple[str, ...], list[str]] = {}
    texts = []
    for line in lines:
        if "took" in line and (fields := _fields(line)):
            cells = " | ".join(_cells(line, "what", *fields))
            tables.setdefault(fields, head("measured", *fields)).append(f"| {cells} |")
        for name, value in line.items():
            if "\n" in str(value):
                texts += [f"{line['what']}, {name}:", "", f"```text\n{value.rstrip()}\n```", ""]
    return [row for rows in tables.values() for row in (*rows, "")] + texts


def result_of(step: str, lines: list[dict[str, Any]]) -> str:
    """The field RESULT of the step's module, of all lines that have it, for the first table."""
    if hasattr(module_of(step), "result"):
        return str(module_of(step).result(lines))
    field = module_of(step).RESULT
    return ", ".join(f"{': '.join(_cells(line, 'what', field))} {field}" for line in lines if field in line)


def _fields(line: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, value in line.items() if name not in ("what", "took") and "\n" not in str(value))


def _cells(line: dict[str, Any], *fields: str) -> list[str]:
    values = (line[field] for field in fields)
    return [f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|") for value in values]


def module_of(step: str) -> Any:
    """The module of a step."""
    return import_module(f"{__package__}.{step.removeprefix(MORE)}")


def run(**job: Any) -> None:
    """Do a `Job`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the started processes
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    module_of(job["step"]).measure(Job(**job), Lines(Job(**job)))
