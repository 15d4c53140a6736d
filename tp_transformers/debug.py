"""Debugging: shards of a model and of its activations, and checks that ranks have the same inputs and replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .namespaces import lazy_names

if TYPE_CHECKING:
    from .features.activations.activations import full_activation, local_activation
    from .features.debug.partition import Partition, head_counts, partition
    from .features.debug.replicas import check_replicas
    from .features.debug.same_inputs import check_inputs
else:
    __getattr__, __dir__ = lazy_names(__name__, {})

__all__ = [
    "Partition",
    "check_inputs",
    "check_replicas",
    "full_activation",
    "head_counts",
    "local_activation",
    "partition",
]
