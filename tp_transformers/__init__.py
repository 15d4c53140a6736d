"""Tensor parallelism for Hugging Face Transformers: `from_pretrained(..., tp_plan="auto")` on any number of ranks.

Importing the package patches nothing and starts nothing; `enable()` does. With TP_TRANSFORMERS_VERBOSITY in the
environment, it sets the level of the package's logger.
"""

from __future__ import annotations

import atexit
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from .logs import read_environment

if TYPE_CHECKING:
    from .checkpoint.reading.distributed import load_distributed_checkpoint
    from .checkpoint.saving.sharded import save_sharded
    from .checkpoint.saving.sharded_checkpoint import verify_sharded
    from .errors import CheckpointError, MeshError, PlanError, RemoteRankError, TensorParallelError, UnsupportedError
    from .loading.hook import disable, enable
    from .model.clip import clip_grad_norm_
    from .model.failures import fail_together, renew_process_group
    from .model.optimizers.groups import parameter_groups
    from .model.parallelize import is_tensor_parallel
    from .model.same_inputs import check_inputs
    from .plans.rule import Attention, Rule
    from .plans.rules import Plan
    from .strategies.base import TensorParallelLayer
    from .strategies.experts import IsolatedParallel
    from .strategies.linear import ColwiseParallel, PackedColwiseParallel, PackedRowwiseParallel, RowwiseParallel
    from .strategies.local import GatherParallel
    from .strategies.loss.cross_entropy import vocab_parallel_cross_entropy
    from .strategies.regions.sequence import SequenceParallel
    from .strategies.registry import STRATEGIES, ParallelInterface
    from .strategies.replicate import ReplicateParallel, ReplicateSumGradParallel
    from .strategies.shards.shard import full_tensor, local_tensor
    from .strategies.shards.slicing import get_packed_weights, get_tensor_shard
    from .training.data_parallel import data_parallel
    from .training.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
    from .training.partition import Partition, partition
    from .training.replicas import check_replicas

__version__ = "0.1.0"

read_environment()

__all__ = [
    "Attention",
    "CheckpointError",
    "ColwiseParallel",
    "GatherParallel",
    "IsolatedParallel",
    "MeshError",
    "PackedColwiseParallel",
    "PackedRowwiseParallel",
    "ParallelInterface",
    "Partition",
    "Plan",
    "PlanError",
    "RemoteRankError",
    "ReplicateParallel",
    "ReplicateSumGradParallel",
    "RowwiseParallel",
    "Rule",
    "STRATEGIES",
    "SequenceParallel",
    "TensorParallelError",
    "TensorParallelLayer",
    "UnsupportedError",
    "check_inputs",
    "check_replicas",
    "clip_grad_norm_",
    "data_parallel",
    "disable",
    "enable",
    "fail_together",
    "full_tensor",
    "get_packed_weights",
    "get_tensor_shard",
    "is_tensor_parallel",
    "load_distributed_checkpoint",
    "load_optimizer_state_dict",
    "local_tensor",
    "optimizer_state_dict",
    "parameter_groups",
    "partition",
    "renew_process_group",
    "save_sharded",
    "verify_sharded",
    "vocab_parallel_cross_entropy",
]

_HOMES = {
    "checkpoint.reading.distributed": "load_distributed_checkpoint",
    "training.optimizer_state": "load_optimizer_state_dict optimizer_state_dict",
    "checkpoint.saving.sharded": "save_sharded",
    "checkpoint.saving.sharded_checkpoint": "verify_sharded",
    "errors": "CheckpointError MeshError PlanError RemoteRankError TensorParallelError UnsupportedError",
    "loading.hook": "disable enable",
    "model.failures": "fail_together renew_process_group",
    "model.optimizers.groups": "parameter_groups",
    "model.parallelize": "is_tensor_parallel",
    "model.same_inputs": "check_inputs",
    "plans.rule": "Attention Rule",
    "plans.rules": "Plan",
    "strategies.loss.cross_entropy": "vocab_parallel_cross_entropy",
    "model.clip": "clip_grad_norm_",
    "training.data_parallel": "data_parallel",
    "training.partition": "Partition partition",
    "training.replicas": "check_replicas",
}
"""Module -> its public names; all others are those of `strategies`."""
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that the command line's `--help` does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f".{_MODULES.get(name, 'strategies')}", __name__), name)
    globals()[name] = found
    return found


@atexit.register
def _tell_of_no_hook() -> None:
    """Say that `enable()` was forgotten, where a model of transformers shows it."""
    if "transformers.modeling_utils" in sys.modules:
        import_module(".loading.forgotten", __name__).tell_of_no_hook()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
