"""The patch of lm_eval: `--model hf --model_args pretrained=NAME,tp_plan=auto` takes any number of KV heads."""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from typing import Any

from ..patches import Patch, Undo, nothing, replace_all
from ..strategies import LocalConfig

_MODULE = "lm_eval.models.huggingface"

_takes_plan: ContextVar[bool] = ContextVar("tp_transformers_harness", default=False)
"""True while a model is made for lm_eval by a plan."""


def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`HFLM.__init__`, which loads by the plan, as any other does, once it has compared KV heads with the ranks."""
    token = _takes_plan.set(bool(kwargs.get("tp_plan")))
    try:
        original(self, *args, **kwargs)
    finally:
        _takes_plan.reset(token)
    if isinstance(self._config, LocalConfig):
        self._config = self._model.config


def _get_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """The method that reads the config; it then shows as many KV heads as there are ranks, which divide them."""
    original(self, *args, **kwargs)
    if _takes_plan.get():
        self._config = LocalConfig(self._config, num_key_value_heads=int(os.environ.get("WORLD_SIZE", 1)))


def _install() -> Undo:
    model: Any = sys.modules[_MODULE].HFLM
    return replace_all([(model, "__init__", _init), (model, "_get_config", _get_config)])


HARNESS = Patch("lm_eval", "HFLM", _install, module=_MODULE, without=nothing)
"""Held by `enable()`. Where lm_eval lacks the names, it refuses KV heads that its ranks do not divide, as by itself."""
