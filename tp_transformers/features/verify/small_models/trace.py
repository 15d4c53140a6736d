"""A record of the inputs and outputs of a model's modules in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass
class Call:
    """One call of a module, with its first floating-point input and its floating-point outputs."""

    name: str
    given: Tensor | None
    returned: list[Tensor] = field(default_factory=list)


@dataclass
class Trace:
    """Inputs and outputs of the modules of a model in one forward."""

    calls: list[Call] = field(default_factory=list)
    """Completed calls in order of return: a module comes after the modules inside it."""
    running: list[Call] = field(default_factory=list)
    """Calls that had not returned when the forward raised, outermost first."""


@contextmanager
def traced(model: nn.Module, trace: Trace) -> Iterator[None]:
    """Record the inputs and outputs of every module within the context."""
    names = {id(module): name for name, module in model.named_modules()}

    def before(module: nn.Module, args: Any, keywords: Any) -> None:
        first_input = next(_tensors((args, keywords)), None)
        trace.running.append(Call(names[id(module)], None if first_input is None else first_input.clone()))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        call = trace.running.pop()
        call.returned = [value.clone() for value in _tensors(output)]
        trace.calls.append(call)

    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(after))
        yield


def _tensors(output: Any) -> Iterator[Tensor]:
    """All floating-point tensors in a module's output, unsharded."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.full_tensor() if isinstance(output, DTensor) else output
    elif isinstance(output, Mapping | tuple | list):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)
