"""Run an example in one process of plain transformers: `python -m benchmarks.alone example.py ARGUMENTS`.

The reference for the ranks' results: arguments that request a plan are dropped, and `enable()` does nothing.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
import transformers

import tp_transformers
from tp_transformers.patches import replace
from tp_transformers.transformers_api import auto_classes

DROPPED = ("tp_plan", "device_mesh", "tp_shares")
"""Arguments of `from_pretrained` that request a plan."""


def _plainly(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{name: kwargs[name] for name in kwargs if name not in DROPPED})


def run_alone(script: str, *arguments: str) -> None:
    """Run `script` as `__main__`."""
    for cls in (transformers.PreTrainedModel, *auto_classes()):
        replace(cls, "from_pretrained", _plainly)
    replace(transformers.Pipeline, "__init__", _plainly)
    changes: dict[Any, dict[str, Any]] = {
        transformers.PreTrainedModel: {"tp_group": SimpleNamespace(rank=0)},
        tp_transformers: {"enable": lambda: None, "data_parallel": lambda model, *_, **__: model},
        torch.distributed.device_mesh: {"init_device_mesh": lambda *_, **__: None},
    }
    for owner, values in changes.items():
        for name, value in values.items():
            setattr(owner, name, value)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_alone(*sys.argv[1:])
