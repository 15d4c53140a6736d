"""Blocks that compute on full sequences or batches, with inputs and outputs that are shards.

shards ── full ── [ block ] ── shards

Gathered activations are not saved for the backward, but gathered again there (Korthikanti et al. 2022). If a norm
computed this rank's shard, the shard is not saved either: the norm is recomputed from its saved input.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from ...anatomy import is_norm
from ...errors import PlanError
from ...marks import Mark
from ...ranks.collectives import (
    Group,
    all_gather_number,
    all_gather_uneven,
    copy_to_region,
    gather_from_region,
    gather_to_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
)
from ...ranks.group import agreed
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import Forward, forward_of, put_parameters
from ...strategies.local import to_local
from ...torch_api import current_backward, top_saved_tensors_hooks, version_of

View = tuple[torch.Size, tuple[int, ...], int]
"""(shape, strides, offset) of a view of a gathered tensor."""
MADE: Mark[tuple[Callable[[], Tensor], int]] = Mark("_tp_made")
"""On the output of a norm, a function that computes the output again, and the version of the output."""


def in_backward() -> int:
    """Return the id of the running backward (checkpointing recomputes activations there); -1 outside a backward."""
    return -1 if torch.compiler.is_compiling() else int(current_backward())


def remember(output: Tensor, module: nn.Module, x: Tensor) -> None:
    """Record that `output` is `module(x)`, if `module` is a norm that can be recomputed with the same result."""
    is_repeatable = is_norm(module) and not torch.is_autocast_enabled(x.device.type)
    if not is_repeatable or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    x, version, parameters = x.detach(), x._version, dict(module._parameters)  # functional_call replaces parameters

    @torch.no_grad()
    def make() -> Tensor:
        if x._version != version:
            raise RuntimeError("the input of a norm was modified by an inplace operation, and is needed in a backward")
        now = put_parameters(module, parameters)
        try:
            return module.forward(x)  # type: ignore[no-any-return]  # without hooks: `x` is the input after pre-hooks
        finally:
            put_parameters(module, now)

    MADE.put(output, (make, output._version))


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
        make, version = MADE.find(shard) or (None, None)
        kept = shard.detach()
        self._make = make if make is not None and version == shard._version else lambda: kept
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
            self._full = all_gather_uneven(self._make(), self._widths, self._group, dim=self._dim)
            self._left = self._uses
        view = self._full.as_strided(*packed)
        self._left -= 1
        if not self._left:
            self._full = None
        return view


SEQUENCE_DIM = 1
"""The sequence dim of a model's activations: (batch, sequence, hidden)."""

Widths = tuple[int, ...]
"""Length of each rank's shard."""


def all_lengths(length: int, mesh: DeviceMesh) -> Widths:
    """Return each rank's `length` (one all-gather of a number)."""
    return all_gather_number(length, mesh.get_group(), mesh.device_type)


class RegionBlock(TensorParallelLayer):
    """A block that computes on the full sequence or batch, between modules that compute on shards."""

    dim: int
    """Sharded dim of the activations (batch, sequence, hidden)."""
    what: str
    """Name of that dim in messages."""
    remedy: str
    """`fix` of the error for a tensor of the wrong length."""

    agreed: frozenset[Any] = frozenset()
    """{(argument, widths)} that all ranks have checked together."""

    def input_widths(self, x: Tensor, mesh: DeviceMesh, forward: Forward) -> Widths | None:
        """Return the lengths of all shards of the input, the same on all ranks; None if `x` is full."""
        raise NotImplementedError

    def unflatten_rows(self, x: Tensor, widths: Widths) -> Tensor:
        """Unflatten an output (tokens, features) to (batch, sequence, features)."""
        length = sum(widths)
        return x.unflatten(0, (-1, length) if self.dim else (length, -1)) if x.shape[0] % length == 0 else x

    def misfit(self, got: str, expected: str) -> PlanError:
        """Make the PlanError for a tensor with the wrong length along `dim`."""
        expected += f" along dim {self.dim}, as the {self.what} is sharded"
        return PlanError(self.name, got=got, expected=expected, fix=self.remedy)

    def check_fit(self, what: str, length: int, widths: Widths, mesh: DeviceMesh, *, broadcasts: bool = False) -> None:
        """Raise PlanError on all ranks if the tensor `what` has the wrong length along `dim` on any rank.

        With equal widths all ranks have the same shapes, so every rank detects a mismatch. With different widths the
        ranks exchange lengths, the first time that a block has these widths (one all-gather of a number).

        `length` is the length of this rank's tensor, `widths` the expected length on each rank; if it `broadcasts`, 1
        is accepted too.
        """
        rank = self.rank
        lengths = (length,) * len(widths)
        if len(set(widths)) > 1 and not torch.compiler.is_compiling() and (what, widths) not in self.agreed:
            lengths = all_lengths(length, mesh)
        elif length == widths[rank] or (broadcasts and length == 1):
            return
        fits = (size == width or (broadcasts and size == 1) for size, width in zip(lengths, widths, strict=True))
        if not all(fits):
            raise agreed(self.misfit(f"{what} of lengths {lengths} on the ranks", f"lengths {widths}"))
        self.agreed |= {(what, widths)}

    def join(self, x: Tensor, widths: Widths, group: Group) -> Tensor:
        """Gather the shards `x`."""
        return gather_from_region(x, widths, group, dim=self.dim)

    def enter(self, x: Tensor, widths: Widths | None, group: Group, forward: Forward) -> Tensor:
        """Gather the shards `x` for the block; if `widths` is None, `x` is full already."""
        return x if widths is None else self.join(x, widths, group)

    def leave(self, x: Tensor, widths: Widths | None, group: Group) -> Tensor:
        """Slice the block's output to this rank's shard; if `widths` is None, return it in full."""
        return x if widths is None else scatter_to_region(x, widths, group, dim=self.dim)

    def stop(self, forward: Forward) -> None:
        """Undo the setup of `enter`, after the block or if it raises."""

    def interrupted(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.stop(forward_of(module))

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        (x, *others), forward = to_local(inputs), forward_of(module)
        forward.notes["in rows"] = x.ndim == 2
        if x.ndim == 2:
            x = x.unsqueeze(1 - self.dim)
        forward.notes["widths"] = widths = self.input_widths(x, mesh, forward)
        if widths is not None and forward.notes["in rows"]:
            forward.notes["widths"] = widths = all_lengths(x.shape[self.dim], mesh)
        elif widths is not None:
            self.check_fit("an input", x.shape[self.dim], widths, mesh)
        return (self.enter(x, widths, mesh.get_group(), forward), *others)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        forward = forward_of(module)
        self.stop(forward)
        widths = forward.notes["widths"]
        x, *others = (outputs,) if isinstance(outputs, Tensor) else outputs
        if widths is not None and x.ndim == 2:
            x = self.unflatten_rows(x, widths)
        if widths is not None and (
            x.ndim <= 2 or x.shape[self.dim] != sum(widths)
        ):  # the output is replicated, so all ranks raise
            raise self.misfit(f"an output of shape {tuple(x.shape)}", f"length {sum(widths)}")
        x = self.leave(x, widths, mesh.get_group())
        if forward.notes["in rows"]:
            x = x.squeeze(1 - self.dim)
        return x if isinstance(outputs, Tensor) else (x, *others)


class GatherMixin(RegionBlock):
    """Around a block that computes locally: gather the input, reduce-scatter the output."""

    def join(self, x: Tensor, widths: Widths, group: Group) -> Tensor:
        return gather_to_region(x, widths, group, dim=self.dim)

    def enter(self, x: Tensor, widths: Widths | None, group: Group, forward: Forward) -> Tensor:
        """See `RegionBlock.enter`; while the block computes, autograd saves its input as this rank's shard."""
        if widths is None:
            return copy_to_region(x, group)
        full = self.join(x, widths, group)
        saving = saving_shard(x, full, widths, group, dim=self.dim)
        if saving is not None:
            saving.__enter__()
            forward.notes["saving"] = saving
        return full

    def leave(self, x: Tensor, widths: Widths | None, group: Group) -> Tensor:
        if widths is None:
            return reduce_from_region(x, group)
        return reduce_scatter_from_region(x, widths, group, dim=self.dim)

    def stop(self, forward: Forward) -> None:
        saving: AbstractContextManager[None] | None = forward.notes.pop("saving", None)
        if saving is not None:
            saving.__exit__(None, None, None)
