"""Changes of other libraries that would read or replace the values of a shard."""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ...patches import Patch, Undo, nothing, replace, replace_all
from ...strategies.shards.tensors import HAS_LOCAL, is_sharded, local_values
from ...torch_api import memory_of
from .values import assign, full_values


def _set(original: Any, parameter: Tensor, values: Tensor) -> None:
    if is_sharded(parameter):
        assign(parameter, values)
    else:
        original(parameter, values)


ASSIGNED_VALUES = Patch(
    "torch", "remove_parametrizations", lambda: replace(nn.utils.parametrize, "_maybe_set", _set), without=nothing
)
"""Lets `remove_parametrizations` write its result to a shard; torch would swap in the full tensor and fail."""


def _bytes_of(original: Any, tensor: Tensor, *args: Any) -> Any:
    return original(full_values(tensor).detach() if is_sharded(tensor) else tensor, *args)


def _find_duplicates(original: Any, state: Any, **options: Any) -> Any:
    """Find names of one tensor in a state of shards by the memory of the shards, which need not fill a storage."""
    if any(isinstance(value, HAS_LOCAL) for value in state.values()):
        tensors: dict[Any, Tensor] = {}
        state = {
            name: tensors.setdefault(memory_of(local_values(value)), torch.empty(1)) for name, value in state.items()
        }
    return original(state, **options)


def _write_full() -> Undo:
    older = [name for name in ("_to_ndarray", "_tobytes") if hasattr(safetensors.torch, name)]
    changes = [(safetensors.torch, name, _bytes_of) for name in older or ["_to_ndarray"]]
    return replace_all([*changes, (safetensors.torch, "_remove_duplicate_names", _find_duplicates)])


FULL_BYTES = Patch("safetensors", "save_file", _write_full)
"""Lets `safetensors.torch.save_file` write full tensors; it would read past the end of a shard's memory.

`safetensors.torch.load_model` finds tied shards."""
