"""Tensor parallelism for Hugging Face Transformers: `from_pretrained(..., tp_plan="auto")` on any number of ranks.

Importing the package patches nothing and starts nothing; `enable()` does.
"""

from .errors import CheckpointError, MeshError, PlanError, RemoteRankError, TensorParallelError, UnsupportedError
from .hook import disable, enable
from .parallelize import is_tensor_parallel
from .plan import Attention, Plan, Rule
from .strategies import (
    STRATEGIES,
    ColwiseParallel,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    ParallelInterface,
    ReplicateParallel,
    ReplicateSumGradParallel,
    RowwiseParallel,
    TensorParallelLayer,
    full_tensor,
    local_tensor,
)

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "CheckpointError",
    "ColwiseParallel",
    "MeshError",
    "PackedColwiseParallel",
    "PackedRowwiseParallel",
    "ParallelInterface",
    "Plan",
    "PlanError",
    "RemoteRankError",
    "ReplicateParallel",
    "ReplicateSumGradParallel",
    "RowwiseParallel",
    "Rule",
    "STRATEGIES",
    "TensorParallelError",
    "TensorParallelLayer",
    "UnsupportedError",
    "disable",
    "enable",
    "full_tensor",
    "is_tensor_parallel",
    "local_tensor",
]
