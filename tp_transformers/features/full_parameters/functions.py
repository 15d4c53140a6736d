"""Classification of torch functions for sharded parameters: elementwise, shape, random, or full tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


READS = _names(
    """
    __format__ __hash__ __repr__ _backward_hooks _is_view _version backward dim element_size get_device
    grad_fn has_names is_complex is_conj is_contiguous is_floating_point is_inference is_neg is_pinned is_same_size
    is_set_to is_shared is_signed ndimension promote_types
    register_hook register_post_accumulate_grad_hook requires_grad_ result_type retain_grad retains_grad
    share_memory_ storage storage_offset storage_type typed_storage _typed_storage
    """
)
"""Functions of metadata or autograd, called on this rank's shard, as most attributes are."""

COPIES = _names(
    """
    bfloat16 clone conj contiguous cpu cuda detach detach_ double empty_like float full_like half ones_like pin_memory
    to type type_as zeros_like zero_ fill_ copy_ masked_fill_
    """
)
"""Elementwise functions that torch does not tag as pointwise."""

FILLS = _names(
    """
    bernoulli_ cauchy_ constant_ exponential_ geometric_ kaiming_normal_ kaiming_uniform_ log_normal_ normal_
    random_ uniform_
    """
)
"""In-place random or constant fills: methods of a tensor, or functions of `torch.nn.init`."""

MAKES = frozenset(("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"))
"""Methods that make a tensor with its own shape argument."""

DRAWS_LIKE = frozenset(("rand_like", "randn_like", "randint_like"))
"""Random functions that read only the shape, dtype and device of their argument."""

OF_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
"""Name prefixes of functions of lists of tensors; `_fused_` and `_amp_foreach_` update elementwise."""

SHAPES = frozenset(("__len__", "nbytes", "nelement", "numel", "shape", "size", "stride"))
"""Functions and attributes of the full tensor's shape."""

_OTHER_NAMES = {"divide": "div", "floordiv": "div", "truediv": "div", "multiply": "mul", "subtract": "sub"}
_OTHER_NAMES |= {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not"}
_OTHER_NAMES |= {"mod": "remainder"}
_NOT_ELEMENTWISE = frozenset(("equal", "frexp", "max", "min", "rrelu"))
"""Operators with both pointwise and other overloads."""


def name_of(func: Callable[..., Any]) -> str:
    """Return the function's name: `NAME` for the getter of an attribute, `NAME =` for its setter."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute: str = getattr(func, "__self__").__name__  # noqa: B009 - functions have none in their type
        return attribute if name == "__get__" else f"{attribute} ="
    return name.partition(".")[0]  # without the overload name that torch dispatch modes see


@cache
def is_elementwise(name: str) -> bool:
    """True if a function is elementwise: each output value depends only on input values at the same index."""
    base = name
    if name.startswith("__") and name.endswith("__"):
        base = name.strip("_")
        forms = (base, base[1:]) if base[0] in "ir" else (base,)
        base = next((form for form in (_OTHER_NAMES.get(form, form) for form in forms) if _is_pointwise(form)), base)
    return name in COPIES or _is_pointwise(_OTHER_NAMES.get(base, base))


def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name.rstrip("_") in _NOT_ELEMENTWISE or name.startswith("_"):
        return False
    return any(torch.Tag.pointwise in getattr(packet, form).tags for form in packet.overloads())


def is_in_place(name: str) -> bool:
    """True if a function changes its first argument in place."""
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


def fits(shape: Sequence[int], full: Sequence[int]) -> bool:
    """True if a tensor of `shape` broadcasts to the shape `full`."""
    return len(shape) <= len(full) and all(
        size in (1, full_size) for size, full_size in zip(reversed(shape), reversed(full), strict=False)
    )
