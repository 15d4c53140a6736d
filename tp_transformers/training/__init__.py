"""Training: optimizers and their states, copies of a model, transformers' Trainer. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..namespaces import lazy_names

if TYPE_CHECKING:
    from ..model.optimizers.groups import parameter_groups
    from .optimizer_state import load_optimizer_state_dict, optimizer_state_dict
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "optimizer_state": "load_optimizer_state_dict optimizer_state_dict",
            ".model.optimizers.groups": "parameter_groups",
        },
    )

__all__ = ["load_optimizer_state_dict", "optimizer_state_dict", "parameter_groups"]
