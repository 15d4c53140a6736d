"""Options of `from_pretrained` beside `tp_plan`, and the arguments that conflict with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ..errors import CheckpointError, PlanError, UnsupportedError, nearest, shown
from ..plans.parse import is_shares
from ..plans.rules import Plan
from ..seams import plan_options
from ..text import is_path


@dataclass(frozen=True)
class Options:
    """Options of this package: True, False, or None for the default. `tp_shares` are numbers or a word,
    `tp_reduce_dtype` is a dtype, and `tp_watch` may be a number."""

    allow_replicated: bool | None = None
    """True: a plan that a transformers class declares may leave layers replicated. None: it may not."""
    tp_dequantize: bool | None = None
    """False: a quantised checkpoint stays packed in memory, and is dequantised in each forward. None: True."""
    tp_map: bool | None = None
    """False: on a CPU, nothing is mapped from files. None: shards that are one contiguous range of a local file are."""
    tp_prefetch: bool | None = None
    """True: the ranks of a node fill the page cache together. None: if it is cold."""
    tp_stream: bool | None = None
    """True: read weights from the Hub without a download. None: as TP_TRANSFORMERS_STREAM is set."""
    tp_shares: Sequence[float] | str | None = None
    """The share of each rank: positive numbers, "memory" or "speed". None: as TP_TRANSFORMERS_SHARES is set."""
    tp_reduce_dtype: torch.dtype | None = None
    """Dtype of sums of gradients over replicas and over copies of the model. None: their own."""
    tp_watch: bool | float | None = None
    """False: ranks do not watch one another. A number: seconds until a silent rank counts as lost. None: 10."""
    of_plan: Mapping[str, Any] = field(default_factory=dict)
    """Options of features that rewrite the plan: name without `tp_` -> value."""

    @classmethod
    def take(cls, kwargs: dict[str, Any]) -> Options:
        """Take the options out of the arguments of a `from_pretrained`; `check` checks their types."""
        own = {name: kwargs.pop(name) for name in _OWN if name in kwargs}
        taken = {option.name: kwargs.pop(option.argument, None) for option in plan_options()}
        return cls(**own, of_plan={name: value for name, value in taken.items() if value is not None})

    def change(self, plan: Plan) -> Plan:
        """The plan with the caller's options and shares."""
        shares = self.tp_shares
        numbers = plan.shares if shares is None else shares if isinstance(shares, str) else tuple(shares)
        return replace(plan.with_options(**self.of_plan), shares=numbers)

    @property
    def streams(self) -> bool:
        """True if weights on the Hub are read from there."""
        if self.tp_stream is not None:
            return self.tp_stream
        return os.environ.get("TP_TRANSFORMERS_STREAM", "0") not in ("", "0")

    def check(self, name: Any, arguments: Mapping[str, Any]) -> None:
        """Reject arguments that conflict with a plan, and a folder that does not exist.

        Raises:
            PlanError: an unknown option, or one of the wrong type; an argument that places weights.
            UnsupportedError: an unsupported argument.
            CheckpointError: a folder that does not exist.
        """
        for added in plan_options():
            added.check(self.of_plan.get(added.name))
        for option in _OWN:
            value = getattr(self, option)
            fits, expected, example = value is None or isinstance(value, bool), "True, False or None", "True"
            if option == "tp_reduce_dtype":
                fits = value is None or (isinstance(value, torch.dtype) and value.is_floating_point)
                expected, example = "a floating-point dtype of torch or None", "torch.float32"
            elif option == "tp_watch":
                fits = value is None or (isinstance(value, bool | int | float) and (value is False or value > 0))
                expected, example = "False, or seconds above 0", "60.0"
            elif option == "tp_shares":
                fits = value is None or is_shares(value)
                expected, example = 'a positive number for each rank, "memory" or "speed"', "[2, 1, 1] on three ranks"
            if not fits:
                fix = f"Pass {option}={example}, or leave it out."
                raise PlanError(option, got=shown(value), expected=expected, fix=fix)
        for argument in arguments:
            if argument.startswith("tp_"):
                fix = f"There are tp_plan, tp_size, {', '.join(OPTIONS)}."
                raise PlanError(
                    "from_pretrained", got=f"{argument}{nearest(argument, OPTIONS)}", expected="an option", fix=fix
                )
        for argument in INSTEAD:
            if arguments.get(argument) is not None:
                raise PlanError(
                    "from_pretrained",
                    got=f"both tp_plan and {argument}",
                    expected="one of them",
                    fix=f"Leave out {argument}: with tp_plan each rank loads its shard to its own device.",
                )
        if self.tp_dequantize is False and arguments.get("quantization_config") is not None:
            fix = "Leave out quantization_config to keep weights packed, or tp_dequantize to undo it."
            got = "both tp_dequantize=False and quantization_config"
            raise PlanError("from_pretrained", got=got, expected="one of them", fix=fix)
        if self.tp_stream and arguments.get("gguf_file") is not None:
            fix = "Leave out tp_stream: one rank of each node downloads the file, each reads its slices."
            got = "both tp_stream=True and gguf_file"
            raise UnsupportedError("from_pretrained", got=got, expected="one of them", fix=fix)
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
_OWN = tuple(entry.name for entry in fields(Options) if entry.name != "of_plan")
OPTIONS = (*_OWN, *(option.argument for option in plan_options()))
"""All options, those of features included."""


def refuse_without_tp_plan(kwargs: Mapping[str, Any]) -> None:
    """Raise PlanError if options are given without `tp_plan`; transformers would pass them to the model."""
    options = [option for option in OPTIONS if kwargs.get(option) is not None]
    if options:
        raise PlanError(
            "from_pretrained",
            got=f"{', '.join(options)} without tp_plan",
            expected="them together",
            fix=f'Pass tp_plan="auto", or leave out {", ".join(options)}.',
        )
