"""Training: public names of features that train a model. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..namespaces import lazy_names

if TYPE_CHECKING:
    from ..features.dcp.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
    from ..features.expert_parallel.expert_load import ExpertLoad
    from ..features.full_parameters.full_parameters import full_parameters
    from ..features.full_parameters.optimizers.scopes import parameter_groups
    from ..features.reshard.training import reshard
else:
    __getattr__, __dir__ = lazy_names(__name__, {})

__all__ = [
    "ExpertLoad",
    "full_parameters",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
    "parameter_groups",
    "reshard",
]
