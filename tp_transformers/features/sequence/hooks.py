"""User hooks between the blocks of a sequence-parallel model: they see full sequences.

    shard ── all-gather ── full ── hook ── own slice ── shard      backward: own slice, all-gather

`register_forward_hook` and the other register methods of these modules wrap each hook; torch stores and calls it. A
model without hooks runs no extra code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from ...errors import UnsupportedError
from ...logs import get_logger
from ...marks import untyped
from ...ranks.collectives import gather_from_region, scatter_to_region
from ...ranks.group import agreed
from ...strategies.base import STRATEGY
from ...strategies.forward.attach import argument_names
from ...strategies.signature import SEQUENCE, Signature
from ...torch_api import take
from .region import SEQUENCE_DIM, Widths
from .signatures import exchanges_tokens, gathers_sequence, scatters_sequence

logger = get_logger(__name__)

GLOBAL_HOOKS = (
    take("torch.nn.modules.module._global_forward_pre_hooks", {}),
    take("torch.nn.modules.module._global_forward_hooks", {}),
    take("torch.nn.modules.module._global_backward_pre_hooks", {}),
    take("torch.nn.modules.module._global_backward_hooks", {}),
)
"""The global hooks on all modules, by handle id."""
Hook = Callable[..., Any]
Values = tuple[Any, ...]
"""Arguments, outputs or gradients of a module: the first may be this rank's shard of a sequence."""

_TAKE_SHARDS = (f"{__name__.partition('.')[0]}.", "torch.", "transformers.utils.output_capturing")
"""Hooks of these packages take shards: ours on dropouts, FSDP's, and those that record hidden states, which the base
model gathers."""


WidthsOf = Callable[[str, Tensor, DeviceMesh], Widths | None]


def gather_around_hooks(base: nn.Module, name: str, widths_of: WidthsOf, mesh: DeviceMesh) -> None:
    """Wrap the register methods of modules in `base` that compute on shards, so that user hooks see full sequences.

    `name` is the name of `base`. `widths_of` returns each rank's length; None for a full sequence.
    """
    for path, module, in_mixture in _between_blocks(base, name):
        sides = _Sides(module, path, widths_of, mesh)
        sides.in_mixture, sides.leaves_full = in_mixture, module in base.children()
        for register, wrapper in _WRAPPERS.items():
            method = MethodType(
                _registering(register, wrapper, sides), module
            )  # deepcopy rebinds a MethodType to the copy
            setattr(untyped(module), register, method)


def _between_blocks(base: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield modules with sharded inputs or outputs: (name, module, True beside experts that exchange tokens)."""
    for child, module in base.named_children():
        path = f"{name}.{child}".lstrip(".")
        if _signature(module).takes is SEQUENCE:  # the norm after the layers
            yield path, module, False
        elif any(scatters_sequence(_signature(layer)) for layer in module.children()):
            for index, layer in module.named_children():
                yield from _on_shards(f"{path}.{index}", layer, in_mixture=False)


def _on_shards(name: str, module: nn.Module, *, in_mixture: bool) -> Iterator[tuple[str, nn.Module, bool]]:
    yield name, module, in_mixture
    if not (gathers_sequence(_signature(module)) or exchanges_tokens(_signature(module))):
        in_mixture = in_mixture or any(exchanges_tokens(_signature(child)) for child in module.children())
        for child, inner in module.named_children():
            yield from _on_shards(f"{name}.{child}", inner, in_mixture=in_mixture)


def _signature(module: nn.Module) -> Signature:
    strategy = STRATEGY.find(module)
    return Signature() if strategy is None else strategy.signature


class _Sides:
    """The inputs and outputs of a module, and whether each is sharded along the sequence."""

    in_mixture = False
    """True beside experts that exchange tokens."""
    leaves_full = False
    """True for the norm after the layers."""

    def __init__(self, module: nn.Module, name: str, widths_of: WidthsOf, mesh: DeviceMesh) -> None:
        self.name, self.widths_of, self.mesh = name, widths_of, mesh
        self.first = next(iter(argument_names(module)), "")
        self.takes_full = scatters_sequence(_signature(module))

    def inputs(self, values: Values) -> _Gathered:
        """Gather the positional arguments, or their gradients."""
        return _Gathered(values, self, is_full=self.takes_full)

    def outputs(self, values: Values) -> _Gathered:
        """Gather the outputs, or their gradients."""
        return _Gathered(values, self, is_full=self.leaves_full)

    def hook_args(self, args: Values, keywords: Sequence[dict[str, Any]]) -> tuple[_Gathered, Values]:
        """Gather the arguments, and return them as a hook takes them: positional, and keywords if it asks for them."""
        if args or not keywords or self.first not in keywords[0]:
            gathered = self.inputs(args)
            return gathered, (gathered.values, *keywords)
        gathered = self.inputs((keywords[0][self.first],))
        return gathered, (args, {**keywords[0], self.first: gathered.values[0]})


class _Gathered:
    """Values of a module for one call of a hook, the first one gathered along the sequence."""

    def __init__(self, values: Values, sides: _Sides, *, is_full: bool) -> None:
        self.values, self.sides, self.widths = values, sides, None
        shard: Any = values[0] if values else None
        if isinstance(shard, Tensor) and shard.ndim > SEQUENCE_DIM + 1 and not is_full:
            self.widths = sides.widths_of(sides.name, shard, sides.mesh)
        if self.widths is not None:
            self.shard = shard
            self.full = gather_from_region(shard, self.widths, sides.mesh.get_group(), dim=SEQUENCE_DIM)
            self.version = _version(self.full)
            self.values = (self.full, *values[1:])

    def slice_first(self, values: Values) -> Values:
        """Slice the first of the values that a hook returned to this rank's shard."""
        if self.widths is None or not values or not isinstance(values[0], Tensor):
            return values
        shape, length = tuple(values[0].shape), sum(self.widths)
        if shape[SEQUENCE_DIM : SEQUENCE_DIM + 1] != (length,):
            raise agreed(
                UnsupportedError(
                    f"a hook on {self.sides.name}",
                    got=f"a tensor of shape {shape} from it",
                    expected=f"length {length} along dim {SEQUENCE_DIM}, of the full sequence (tp_sequence_parallel)",
                    fix="Return a tensor of the shape that the hook was given, or load without tp_sequence_parallel.",
                )
            )
        return (self._slice(values[0]), *values[1:])

    def write_back(self) -> bool:
        """If the hook changed the full tensor in place, copy this rank's slice to the shard.

        Returns True if the module has to use a slice of the full tensor instead of the shard, so that gradients flow
        through the full tensor: the hook may have registered tensor hooks on it.
        """
        if self.widths is None:
            return False
        if self.version is None or self.full._version != self.version:
            self.shard.copy_(self._slice(self.full))
            return False
        return self.full.requires_grad

    def _slice(self, full: Tensor) -> Tensor:
        assert self.widths is not None
        return scatter_to_region(full, self.widths, self.sides.mesh.get_group(), dim=SEQUENCE_DIM)


def _version(x: Tensor) -> int | None:
    """Return the version counter of a tensor; None in inference mode and under torch.compile."""
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version


def _pre_hook(hook: Hook, sides: _Sides) -> Hook:
    def hooked(module: nn.Module, args: Values, *keywords: dict[str, Any]) -> Any:
        gathered, hook_args = sides.hook_args(args, keywords)
        result = hook(module, *hook_args)
        uses_slice = gathered.write_back()
        if result is None and not uses_slice:
            return None
        if not keywords:
            return gathered.slice_first(gathered.values if result is None else _as_tuple(result))
        args, kwargs = hook_args if result is None else result
        if args:
            return gathered.slice_first(args), kwargs
        return args, {
            **kwargs,
            **{name: gathered.slice_first((kwargs[name],))[0] for name in {sides.first} & kwargs.keys()},
        }

    return hooked


def _forward_hook(hook: Hook, sides: _Sides) -> Hook:
    def hooked(module: nn.Module, args: Values, *rest: Any) -> Any:
        *keywords, output = rest
        if output is None:  # the forward raised
            return hook(module, args, *rest)
        inputs, hook_args = sides.hook_args(args, keywords)
        outputs = sides.outputs(_as_tuple(output))
        full_output = outputs.values if isinstance(output, tuple) else outputs.values[0]
        result = hook(module, *hook_args, full_output)
        inputs.write_back()
        if not outputs.write_back() and result is None:
            return None
        result = full_output if result is None else result
        return outputs.slice_first(result) if isinstance(result, tuple) else outputs.slice_first((result,))[0]

    return hooked


def _backward_hook(hook: Hook, sides: _Sides) -> Hook:
    """A pre-hook takes the gradients of the outputs, another hook those of the inputs before them."""

    def hooked(module: nn.Module, *grads: Values) -> Any:
        gathered = [*map(sides.inputs, grads[:-1]), sides.outputs(grads[-1])]
        result = hook(module, *(each.values for each in gathered))
        return None if result is None else gathered[0].slice_first(_as_tuple(result))

    return hooked


def _refuse(hook: Hook, sides: _Sides) -> Hook:
    raise UnsupportedError(
        f"register_backward_hook on {sides.name}",
        got="a module that computes on a shard of the sequence",
        expected="a hook that is given gradients of the module's own inputs and outputs",
        fix="Use register_full_backward_hook, or load without tp_sequence_parallel.",
    )


_WRAPPERS: dict[str, Callable[[Hook, _Sides], Hook]] = {
    "register_forward_pre_hook": _pre_hook,
    "register_forward_hook": _forward_hook,
    "register_full_backward_pre_hook": _backward_hook,
    "register_full_backward_hook": _backward_hook,
    "register_backward_hook": _refuse,
}
"""{register method: wrapper of a hook}."""


def _registering(name: str, wrapper: Callable[[Hook, _Sides], Hook], sides: _Sides) -> Callable[..., RemovableHandle]:
    @wraps(getattr(nn.Module, name))
    def register(module: nn.Module, hook: Hook, *args: Any, **options: Any) -> RemovableHandle:
        if not _takes_shards(hook):
            if sides.in_mixture:
                raise UnsupportedError(
                    f"a hook on {sides.name}",
                    got="a module on this rank's tokens of the sequence, beside experts that exchange them",
                    expected="a module on complete sequences",
                    fix="Put it on the block around it, use moe_tp_experts, or load without tp_sequence_parallel.",
                )
            hook = wraps(hook)(wrapper(hook, sides))
        handle: RemovableHandle = getattr(type(module), name)(module, hook, *args, **options)
        return handle

    return register


def warn_of_global_hooks() -> None:
    """Warn once about each global module hook of the user: its inputs are not gathered."""
    for number, hook in (item for hooks in GLOBAL_HOOKS for item in hooks.items()):
        if number not in _warned and not _takes_shards(hook):
            _warned.add(number)
            logger.warning(
                "a hook of all modules, %s, sees this rank's shard of sequences between blocks (tp_sequence_parallel), "
                "and what it changes there differs from one process. Put it on the modules that it is for, by their "
                "register_forward_hook and the like, or load without tp_sequence_parallel.",
                getattr(hook, "__qualname__", type(hook).__name__),
            )


_warned: set[int] = set()
"""Ids of hooks that were logged; torch never reuses an id."""


def _takes_shards(hook: Hook) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_TAKE_SHARDS)


def _as_tuple(values: Any) -> Values:
    return values if isinstance(values, tuple) else (values,)
