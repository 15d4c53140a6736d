"""Load that stops before the first weight: the model on the meta device, its plan, its checkpoint's tensors.

One process reads the config and the headers. Dtypes, conversions and tied weights come from the code of a load.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from ...errors import CheckpointError, TensorParallelError, in_one_line
from ...loading.from_pretrained import from_pretrained_with
from ...loading.hook import enable
from ...loading.options import OPTIONS
from ...loading.request import LoadRequest
from ...plans.rules import Plan
from ..command_line.models import model_class, read_config
from .described import described_dtype
from .survey import Survey, take_survey

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")
"""Extensions of weight files, of any format."""


def survey(
    name: str, *, dtype: torch.dtype | str = "auto", packed: bool = False, where: Any = None, **arguments: Any
) -> Survey:
    """Prepare a load of a model, without reading weights.

    Args:
        name: a folder with a config and perhaps weights, the config in it, or a name on the Hub; only headers are
            fetched.
        dtype: as `from_pretrained` takes it; for a config without weights, "auto" is that of `described_dtype`.
        packed: whether quantised weights stay packed (`tp_dequantize=False`).
        where: arguments of `read_config`, such as revision and trust_remote_code.
        arguments: further ones of `from_pretrained`; `tp_plan` is "auto" unless given.

    Raises:
        UsageError: if there is no such model.
        CheckpointError: if a load would reject the checkpoint, for a tensor of the wrong shape, say.
        PlanError: if there is no plan, or it is malformed.
        UnsupportedError: if a load would reject the model.
    """
    if os.path.isfile(name) and os.path.basename(name) == "config.json":
        name = os.path.dirname(name) or "."
    where = {"trust_remote_code": False, **(where or {})}
    kwargs: dict[str, Any] = {**where, "tp_plan": "auto", "tp_dequantize": not packed, "dtype": dtype, **arguments}
    options = {"tp_stream": True, "tp_prefetch": False}  # of features that may not be there
    kwargs |= {option: value for option, value in options.items() if option in OPTIONS}
    guess: str | None = None
    try:
        config = read_config(name, **where)
        has_weights = not os.path.isdir(name) or any(file.endswith(WEIGHTS) for file in os.listdir(name))
        if not has_weights:
            kwargs |= {"config": config, "state_dict": {}}
            if dtype == "auto":
                kwargs["dtype"], guess = described_dtype(config)
        try:
            with enable():
                from_pretrained_with(_stop, model_class(config, **where), name if has_weights else None, **kwargs)
        except _FoundError as found:
            model, plan, request = found.args
        surveyed = take_survey(name, model, plan, request)
        return replace(surveyed, notes=(*filter(None, [guess]), *surveyed.notes))
    except TensorParallelError:
        raise
    except Exception as error:  # a malformed config or folder may raise any error
        expected, fix = "a config and weights that transformers loads", "Correct its config.json, or its files."
        raise CheckpointError(name, got=in_one_line(error), expected=expected, fix=fix) from error


class _FoundError(Exception):
    """Ends a load before the first weight."""


def _stop(model: PreTrainedModel, plan: Plan, request: LoadRequest) -> NoReturn:
    """Replacement of a load: raises _FoundError with its arguments."""
    raise _FoundError(model, plan, request)
