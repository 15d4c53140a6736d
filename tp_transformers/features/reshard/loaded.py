"""What a load leaves on a parameter: whether the parameter still has the values of the load."""

from __future__ import annotations

from torch import Tensor, nn

from ...marks import Mark
from ...strategies import local_tensor
from ...torch_api import version_of

_VERSION: Mark[int] = Mark("tp_loaded_version")
"""On a parameter: the version of its values when it was loaded."""


def remember(model: nn.Module) -> None:
    """Mark the parameters of a loaded model."""
    for param in model.parameters():
        _VERSION.put(param, version_of(local_tensor(param)))


def is_changed(tensor: Tensor) -> bool:
    """True if a parameter was written to or replaced since it was loaded, or is none; writes to `data` are not seen."""
    return _VERSION.find(tensor) != version_of(local_tensor(tensor))


def forget(tensor: Tensor) -> None:
    """Let `is_changed` be true of a parameter from now on."""
    _VERSION.put(tensor, -1)
