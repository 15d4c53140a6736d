"""The patch of lm_eval: `--model hf --model_args pretrained=NAME,tp_plan=auto` works with any number of KV heads."""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from typing import Any

from ...patches import Patch, Undo, nothing, replace_all

_MODULE = "lm_eval.models.huggingface"

_takes_plan: ContextVar[bool] = ContextVar("tp_transformers_harness", default=False)
"""True while lm_eval creates a model with a `tp_plan`."""


def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`HFLM.__init__`: it compares KV heads with the ranks, then loads by the plan like any other load."""
    token = _takes_plan.set(bool(kwargs.get("tp_plan")))
    try:
        original(self, *args, **kwargs)
    finally:
        _takes_plan.reset(token)
    from ...strategies import LocalConfig

    if isinstance(self._config, LocalConfig):
        self._config = self._model.config


def _get_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`HFLM._get_config`: the config then has as many KV heads as there are ranks, so that the comparison passes."""
    original(self, *args, **kwargs)
    if _takes_plan.get():
        from ...strategies import LocalConfig

        self._config = LocalConfig(self._config, num_key_value_heads=int(os.environ.get("WORLD_SIZE", 1)))


def _install() -> Undo:
    model: Any = sys.modules[_MODULE].HFLM
    return replace_all([(model, "__init__", _init), (model, "_get_config", _get_config)])


HARNESS = Patch("lm_eval", "HFLM", _install, module=_MODULE, without=nothing)
"""Held by `enable()`. If lm_eval lacks the names, it still rejects KV heads that its ranks do not divide."""
