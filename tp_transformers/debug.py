"""Debugging: the shards of a model on each rank, and checks that ranks have the same inputs and replicas."""

from .model.same_inputs import check_inputs
from .training.partition import Partition, partition
from .training.replicas import check_replicas

__all__ = ["Partition", "check_inputs", "check_replicas", "partition"]
