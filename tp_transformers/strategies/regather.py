"""What every rank gathers for its forward, and gathers again for its backward rather than keep (Korthikanti et al.)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..collectives import Group, all_gather_uneven

View = tuple[torch.Size, tuple[int, ...], int]
"""(shape, strides, offset) of a view of a gathered tensor."""

_active_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class Regathered(saved_tensors_hooks):
    """A context in which autograd saves, of a gathered tensor and its views, this rank's part alone.

    The first operation of a backward that needs the whole gathers it (all-gather), the last lets it go. The ranks do so
    in the same order, since they run the same operations.
    """

    def __init__(self, part: Tensor, whole: Tensor, widths: tuple[int, ...], group: Group, *, dim: int) -> None:
        super().__init__(self._pack, self._unpack)
        self._part, self._widths, self._group, self._dim = part.detach(), widths, group, dim
        self._address = whole.untyped_storage().data_ptr()
        self._whole: Tensor | None = None
        self._uses, self._left = 0, 0

    @staticmethod
    def is_useful() -> bool:
        """Whether autograd would keep what is gathered: it records, and nothing else decides what it saves.

        Gradient checkpointing and offloading do; of several such contexts only the innermost counts.
        """
        return (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and _active_hooks is not None
            and _active_hooks(True) is None
        )

    def _pack(self, x: Tensor) -> Tensor | View:
        if x.numel() and x.untyped_storage().data_ptr() == self._address:
            self._uses += 1
            return x.shape, x.stride(), int(x.storage_offset())
        return x.detach()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._whole is None:
            self._whole = all_gather_uneven(self._part, self._widths, self._group, dim=self._dim)
            self._left = self._uses
        view = self._whole.as_strided(*packed)
        self._left -= 1
        if not self._left:
            self._whole = None
        return view
