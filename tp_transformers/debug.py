"""Debugging: shards of a model and of its activations, and checks that ranks have the same inputs and replicas."""

from .model.same_inputs import check_inputs
from .strategies.activations import full_activation, local_activation
from .training.partition import Partition, partition
from .training.replicas import check_replicas

__all__ = ["Partition", "check_inputs", "check_replicas", "full_activation", "local_activation", "partition"]
