"""Tensor parallelism for Hugging Face Transformers: `from_pretrained(..., tp_plan="auto")` on any number of ranks.

Importing the package patches nothing and starts nothing; `enable()` does. With TP_TRANSFORMERS_VERBOSITY in the
environment, it sets the level of the package's logger.
"""

from .checkpoint.saving.dcp import load_optimizer_state_dict, optimizer_state_dict
from .checkpoint.saving.sharded import save_sharded, verify_sharded
from .errors import CheckpointError, MeshError, PlanError, RemoteRankError, TensorParallelError, UnsupportedError
from .loading.hook import disable, enable
from .logs import read_environment
from .model.optimizer_groups import parameter_groups
from .model.parallelize import is_tensor_parallel
from .model.same_inputs import check_inputs
from .plans.rules import Attention, Plan, Rule
from .strategies import (
    STRATEGIES,
    ColwiseParallel,
    GatherParallel,
    IsolatedParallel,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    ParallelInterface,
    ReplicateParallel,
    ReplicateSumGradParallel,
    RowwiseParallel,
    SequenceParallel,
    TensorParallelLayer,
    full_tensor,
    get_packed_weights,
    get_tensor_shard,
    local_tensor,
)
from .strategies.cross_entropy import vocab_parallel_cross_entropy
from .training.clip import clip_grad_norm_
from .training.data_parallel import data_parallel
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
    "full_tensor",
    "get_packed_weights",
    "get_tensor_shard",
    "is_tensor_parallel",
    "load_optimizer_state_dict",
    "local_tensor",
    "optimizer_state_dict",
    "parameter_groups",
    "partition",
    "save_sharded",
    "verify_sharded",
    "vocab_parallel_cross_entropy",
]
