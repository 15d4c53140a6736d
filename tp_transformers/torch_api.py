"""The private API of torch that this package uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Let torch.compile leave `function`, and all that it calls, to Python where nobody inlines it.

    It does what `torch.compiler.disable` does, without a call around each call, and without the import of Dynamo. A
    caller that is traced inlines the function nevertheless.
    """
    dynamo = torch._C._dynamo.eval_frame
    try:
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    except AttributeError:
        return cast(F, torch.compiler.disable(function))
    return function
