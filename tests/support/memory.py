"""Bytes of the tensors that operations make."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tp_transformers import local_tensor


class Memory(TorchDispatchMode):
    """Within the context, the bytes of tensors that operations of this thread have made: alive now, and at the peak.

    Views of parameters and inputs are not counted.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """The parameters and buffers of `model` are known from before."""
        super().__init__()
        self.live, self.peak, self._seen = 0, 0, set[int]()
        known = (*model.parameters(), *model.buffers()) if model is not None else ()
        self._known = {local_tensor(tensor).untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._count(tensor.untyped_storage(), given)
        return outputs

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in given or key in self._seen or key in self._known:
            return
        self._seen.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes
