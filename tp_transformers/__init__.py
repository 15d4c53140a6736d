"""Tensor parallelism for Hugging Face Transformers: `from_pretrained(..., tp_plan="auto")` on any number of ranks.

Importing the package patches nothing and starts nothing; `enable()` does. With TP_TRANSFORMERS_VERBOSITY in the
environment, it sets the level of the package's logger.
"""

from .checkpoint.distributed import load_optimizer_state_dict, optimizer_state_dict
from .checkpoint.sharded import save_sharded, verify_sharded
from .data_parallel import data_parallel
from .errors import CheckpointError, MeshError, PlanError, RemoteRankError, TensorParallelError, UnsupportedError
from .gradients import clip_grad_norm_, parameter_groups
from .guard import check_inputs
from .hook import disable, enable
from .logs import read_environment
from .loss import vocab_parallel_cross_entropy
from .parallelize import is_tensor_parallel
from .partitions import Partition, partition
from .plan import Attention, Plan, Rule
from .replicas import check_replicas
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
