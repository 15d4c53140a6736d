"""Debugging: shards of a model and of its activations, and checks that ranks have the same inputs and replicas."""

from .model.same_inputs import check_inputs
from .plans.attention_heads import head_counts
from .strategies.activations import full_activation, local_activation
from .training.partition import Partition, partition
from .training.replicas import check_replicas

__all__ = [
    "Partition",
    "check_inputs",
    "check_replicas",
    "full_activation",
    "head_counts",
    "local_activation",
    "partition",
]
