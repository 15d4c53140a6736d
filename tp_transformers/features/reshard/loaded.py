"""What a load leaves on a model: its options, and for each parameter whether it still has the values of the load."""

from __future__ import annotations

from torch import Tensor

from ...loading.options import Options
from ...marks import Mark
from ...strategies import local_tensor

OPTIONS: Mark[Options] = Mark("tp_options")
"""On a model: the options of its load."""
_VERSION: Mark[int] = Mark("tp_loaded_version")
"""On a parameter: the version of its values when it was loaded."""


def remember(options: Options, model: object) -> None:
    """Mark a loaded model."""
    OPTIONS.put(model, options)
    for param in model.parameters():  # type: ignore[attr-defined]
        _VERSION.put(param, local_tensor(param)._version)


def is_changed(tensor: Tensor) -> bool:
    """True if a parameter was written to or replaced since it was loaded, or is none; writes to `data` are not seen."""
    return _VERSION.find(tensor) != local_tensor(tensor)._version


def forget(tensor: Tensor) -> None:
    """Let `is_changed` be true of a parameter from now on."""
    _VERSION.put(tensor, -1)
