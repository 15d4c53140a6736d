"""Packed weights outside of the forward of their module: placeholders, and the methods of modules that hold them.

A placeholder has the shape, dtype and shard of the weight, and no values. What would read or change them raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from ...anatomy import check_values
from ...errors import UnsupportedError
from ...features.full_parameters.functions import READS, SHAPES, name_of
from ...marks import untyped
from ...patches import Patch, Undo, replace_all
from ...seams import Mixin
from .weight import HeldWeight, packed_weights, unpacked_only, without_packed

_DESCRIBING = {*READS, *SHAPES, "data_ptr", "untyped_storage", "requires_grad =", "grad =", "_backward_hooks ="}
_VIEWS = ("T", "mT", "H", "mH", "real", "imag")
"""Attributes that are views."""


class Placeholder:
    """Mixin of a parameter's class: functions that need its values raise UnsupportedError."""

    @staticmethod
    def tp_needs_values(subject: str, got: str) -> UnsupportedError:
        """The error of `check_values`."""
        return unpacked_only(subject, got.format("packed weights"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Describe, copy or freeze the placeholder; see the class."""
        name, kwargs = name_of(func), kwargs or {}
        if name in ("data", "detach", "alias"):
            return args[0]
        is_getter = getattr(func, "__name__", "") == "__get__" and name not in _VIEWS
        if is_getter or name in _DESCRIBING:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]
        if name in ("clone", "__deepcopy__"):
            result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]
            result.__class__ = cls
            return result
        if name == "copy_" and isinstance(args[1], Tensor) and args[1].is_meta:
            return args[0]
        raise unpacked_only(f"{name} of a parameter", "a packed weight")


def without_values(parameter: nn.Parameter) -> nn.Parameter:
    """Make a parameter on the meta device a `Placeholder`; it stays an instance of its class."""
    untyped(parameter).__class__ = _placeholder_class(type(parameter))
    return parameter


@cache
def _placeholder_class(cls: type) -> type:
    return type(cls.__name__, (Placeholder, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _apply(original: Any, self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
    with without_packed(self, fn):
        return original(self, fn, *args, **kwargs)


def _load_state_dict(original: Any, self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    values = (state_dict.get(name) for name in packed_weights(self))
    if any(isinstance(value, Tensor) and not value.is_meta for value in values):
        check_values(self, "load_state_dict")
    return original(self, state_dict, *args, **kwargs)


def _state_dict(original: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """With adapters, packed weights are meta tensors in it: PEFT looks for its own parameters there."""
    is_inner = bool(args) or kwargs.get("destination") is not None
    if not is_inner and not kwargs.get("keep_vars") and not any(hasattr(each, "lora_A") for each in self.modules()):
        check_values(self, "state_dict")
    return original(self, *args, **kwargs)


def _change() -> Undo:
    methods: dict[str, Any] = {"_apply": _apply, "load_state_dict": _load_state_dict, "state_dict": _state_dict}
    return replace_all((nn.Module, name, method) for name, method in methods.items())


PACKED_PARTS = Patch("torch", "methods of modules with packed weights", _change)
"""Makes casts and state dicts of any part of a packed model raise before they change or return a part of it."""


class HeldWeights(dict[str, HeldWeight]):
    """The packed weights of a module, by parameter name; they hold `PACKED_PARTS`, in copies of the module too."""

    def __new__(cls, *args: Any, **kwargs: Any) -> HeldWeights:
        self = super().__new__(cls, *args, **kwargs)
        PACKED_PARTS.hold_for(self)
        return self


class PackedModel(Mixin):
    """See `Feature.model_methods`."""

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of this rank's parameters and buffers, packed weights in their layouts."""
        packed = sum(weight.nbytes for weight in packed_weights(self).values())
        return packed + int(super().get_memory_footprint(return_buffers))
