"""Callers that take `tp_plan`: transformers' `pipeline`, and lm_eval.

`pipeline(..., tp_plan="auto")`: our arguments go to `from_pretrained`, like those in `model_kwargs`. lm_eval with
`--model hf --model_args pretrained=NAME,tp_plan=auto` works with any number of KV heads.
"""

from __future__ import annotations

import inspect
import os
import sys
from contextvars import ContextVar
from types import FunctionType
from typing import Any

from ...errors import PlanError, TensorParallelError
from ...patches import Patch, Undo, nothing, replace_all

_MODULE = "lm_eval.models.huggingface"

_takes_plan: ContextVar[bool] = ContextVar("tp_transformers_harness", default=False)
"""True while lm_eval creates a model with a `tp_plan`."""
_original: Any = None
"""transformers' `pipeline`, while ours runs in its place."""


def pipeline(*args: Any, **kwargs: Any) -> Any:
    """transformers' `pipeline`, which would pass our arguments to the forward.

    Raises PlanError if the model is already loaded, and the error of a load that fails.
    """
    from ...loading.from_pretrained import FAILURES
    from ...loading.options import INSTEAD, OPTIONS

    names = ("tp_plan", "tp_size", "device_mesh", "distributed_config", *OPTIONS)
    ours = {name: kwargs.pop(name) for name in names if kwargs.get(name) is not None}
    if not ours:
        return _original(*args, **kwargs)
    bound = inspect.signature(_original).bind(*args, **kwargs)
    model = bound.arguments.get("model")
    if model is not None and not isinstance(model, str):
        raise PlanError(
            "pipeline",
            got=f"{', '.join(ours)} and a {type(model).__name__}, which is loaded already",
            expected="one of them",
            fix="Load it with from_pretrained(name, tp_plan=...), or pass its name.",
        )
    for argument in INSTEAD:
        if bound.arguments.get(argument) is not None:  # from_pretrained rejects it
            ours[argument] = bound.arguments.pop(argument)
    bound.arguments["model_kwargs"] = {**(bound.arguments.get("model_kwargs") or {}), **ours}
    failures: list[TensorParallelError] = []
    token = FAILURES.set(failures)
    try:
        return _original(*bound.args, **bound.kwargs)
    except ValueError:  # transformers tries several classes, and raises an error with the text of each
        if not failures:
            raise
        raise failures[-1] from None
    finally:
        FAILURES.reset(token)


def _stand_in(*args: Any, **kwargs: Any) -> Any:
    """Runs with the globals of transformers' module, so it imports the function that it calls."""
    from tp_transformers.features.clients.pipelines import pipeline

    return pipeline(*args, **kwargs)


def _install() -> Undo:
    """Replace the code of the function object, since scripts import its name before they call `enable()`."""
    global _original
    function: Any = sys.modules["transformers.pipelines"].pipeline
    code = function.__code__
    _original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    _original.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = inspect.signature(function)
    function.__code__ = _stand_in.__code__

    def undo() -> None:
        function.__code__ = code
        del function.__signature__

    return undo


PIPELINE = Patch("transformers", "pipeline", _install, module="transformers.pipelines", without=nothing)
"""Held by `enable()`. Without it, `pipeline` rejects our arguments by itself; `model_kwargs` takes them."""


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


def _install_harness() -> Undo:
    model: Any = sys.modules[_MODULE].HFLM
    return replace_all([(model, "__init__", _init), (model, "_get_config", _get_config)])


HARNESS = Patch("lm_eval", "HFLM", _install_harness, module=_MODULE, without=nothing)
"""Held by `enable()`. If lm_eval lacks the names, it still rejects KV heads that its ranks do not divide."""
