"""Options of `from_pretrained` beside `tp_plan`, and the arguments that conflict with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError, PlanError, UnsupportedError, is_path, nearest
from ..plans.rules import Plan
from ..seams import Option, options, plan_options


class _Map(Option):
    """Whether, on a CPU, shards that are one contiguous range of a local file are mapped; so unless False is given."""

    name = "map"


class _ReduceDtype(Option):
    """Dtype of sums of gradients over replicas and over copies of the model. None: the dtype of the gradients."""

    name = "reduce_dtype"
    expected, example = "a floating-point dtype of torch or None", "torch.float32"

    def fits(self, value: Any) -> bool:
        return value is None or (isinstance(value, torch.dtype) and value.is_floating_point)


OPTIONS: Mapping[str, Option] = {option.argument: option for option in (_Map(), _ReduceDtype(), *options())}
"""Options of the core and of all features, by their arguments."""


Options = Mapping[str, Any]
"""The options of one load: argument -> value. Without those that are None, which is the default of all."""


def take_options(kwargs: dict[str, Any]) -> Options:
    """Take the options out of the arguments of a `from_pretrained`; `check_arguments` checks their types."""
    taken = {argument: kwargs.pop(argument, None) for argument in OPTIONS}
    return {argument: value for argument, value in taken.items() if value is not None}


def with_options(plan: Plan, options: Options) -> Plan:
    """The plan with the caller's options that rewrite the rules."""
    of_plan = {option.name: options[option.argument] for option in plan_options() if option.argument in options}
    return plan.with_options(**of_plan)


def check_arguments(name: Any, options: Options, arguments: Mapping[str, Any]) -> None:
    """Reject options and other `arguments` that conflict with a plan, and a folder that does not exist.

    Raises:
        PlanError: an unknown option, or one of the wrong type; an argument that places weights.
        UnsupportedError: an unsupported argument.
        CheckpointError: a folder that does not exist.
    """
    for argument, option in OPTIONS.items():
        option.check(options.get(argument), arguments)
    for argument in arguments:
        if argument.startswith("tp_"):
            got, fix = f"{argument}{nearest(argument, OPTIONS)}", f"There are tp_plan, tp_size, {', '.join(OPTIONS)}."
            raise PlanError("from_pretrained", got=got, expected="an option", fix=fix)
    for argument in INSTEAD:
        if arguments.get(argument) is not None:
            raise PlanError(
                "from_pretrained",
                got=f"both tp_plan and {argument}",
                expected="one of them",
                fix=f"Leave out {argument}: with tp_plan each rank loads its shard to its own device.",
            )
    dtype = arguments.get("dtype", arguments.get("torch_dtype"))
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UnsupportedError(
            "dtype", got=repr(dtype), expected='"auto" or a dtype of torch', fix='Pass "bfloat16", for example.'
        )
    if isinstance(name, str | os.PathLike) and is_path(os.fspath(name)) and not os.path.exists(name):
        fix = "Correct the path, or name a model on the Hub (org/name)."
        raise CheckpointError(f"checkpoint {name}", got="no such folder", expected="one", fix=fix)


INSTEAD = ("device_map", "distributed_config")
"""Arguments of transformers that `tp_plan` replaces."""


def refuse_without_tp_plan(kwargs: Mapping[str, Any]) -> None:
    """Raise PlanError if options are given without `tp_plan`; transformers would pass them to the model."""
    given = [argument for argument in OPTIONS if kwargs.get(argument) is not None]
    if given:
        fix = f'Pass tp_plan="auto", or leave out {", ".join(given)}.'
        raise PlanError("from_pretrained", got=f"{', '.join(given)} without tp_plan", expected="them together", fix=fix)
