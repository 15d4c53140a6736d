"""Gathered activations that are not saved for the backward but gathered again there (Korthikanti et al. 2022).

If a norm computed this rank's shard, the shard is not saved either: the norm is recomputed from its saved input.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...anatomy import is_norm
from ...marks import untyped
from ...ranks.collectives import Group, all_gather_uneven
from ...torch_api import top_saved_tensors_hooks, version_of

View = tuple[torch.Size, tuple[int, ...], int]
"""(shape, strides, offset) of a view of a gathered tensor."""


class _Made(NamedTuple):
    """Record for recomputing the output of a norm."""

    module: nn.Module
    x: Tensor
    version: int
    """Version of `x`."""
    parameters: dict[str, Any]
    """Parameters of the module in that forward; `torch.func.functional_call` replaces them for one forward."""
    made: int
    """Version of the output."""


def remember(output: Tensor, module: nn.Module, x: Tensor) -> None:
    """Record that `output` is `module(x)`, if `module` is a norm that can be recomputed with the same result."""
    is_repeatable = is_norm(module) and not torch.is_autocast_enabled(x.device.type)
    if is_repeatable and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        untyped(output)._tp_made = _Made(module, x.detach(), x._version, dict(module._parameters), output._version)


def saving_shard(
    shard: Tensor, full: Tensor, widths: tuple[int, ...], group: Group, *, dim: int
) -> AbstractContextManager[None] | None:
    """Return a context for autograd to save this rank's `shard` in place of the gathered `full` tensor and its views.

    None if autograd does not record, or other saved-tensor hooks are active, such as those of gradient checkpointing
    and offloading: torch calls only the innermost hooks.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if top_saved_tensors_hooks(True) is not None:
        return None
    regathered = _Regathered(shard, full, widths, group, dim)
    return saved_tensors_hooks(regathered.pack, regathered.unpack)


class _Regathered:
    """The saved shard of a gathered tensor.

    The first operation of a backward that needs the full tensor gathers it (all-gather), the last frees it. The ranks
    gather in the same order, since they run the same operations.
    """

    def __init__(self, shard: Tensor, full: Tensor, widths: tuple[int, ...], group: Group, dim: int) -> None:
        self._widths, self._group, self._dim = widths, group, dim
        made: _Made | None = getattr(shard, "_tp_made", None)
        self._made = made if made is not None and made.made == shard._version else None
        self._shard = shard.detach() if self._made is None else None
        self._address, self._version = full.untyped_storage().data_ptr(), version_of(full)
        self._full: Tensor | None = None
        self._uses, self._left = 0, 0

    def pack(self, x: Tensor) -> tuple[Tensor, int] | View:
        """Return the value that autograd saves in place of `x`: a tensor with its version, or a view to gather again.

        A gathered tensor that has changed since then is kept.
        """
        if x.numel() and x.untyped_storage().data_ptr() == self._address and version_of(x) == self._version:
            self._uses += 1
            return x.shape, x.stride(), int(x.storage_offset())
        return x.detach(), version_of(x)

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that `pack` took. Raises RuntimeError if it was modified since, as autograd does."""
        if isinstance(packed[0], Tensor):
            kept, version = packed
            if version_of(kept) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    f"tensor {list(kept.shape)} is at version {version_of(kept)}, expected version {version}"
                )
            return kept  # type: ignore[no-any-return]
        if self._full is None:
            self._full = all_gather_uneven(self._own_shard(), self._widths, self._group, dim=self._dim)
            self._left = self._uses
        view = self._full.as_strided(*packed)
        self._left -= 1
        if not self._left:
            self._full = None
        return view

    def _own_shard(self) -> Tensor:
        if self._shard is not None:
            return self._shard
        assert self._made is not None
        made, now = self._made, dict(self._made.module._parameters)
        if made.x._version != made.version:
            raise RuntimeError("the input of a norm was modified by an inplace operation, and is needed in a backward")
        made.module._parameters.update(made.parameters)
        try:
            with torch.no_grad():
                shard: Tensor = made.module.forward(made.x)  # without hooks: `x` is the input after pre-hooks
        finally:
            made.module._parameters.update(now)
        return shard
