"""Strategies: how one module is sharded over the ranks, and the communication of its forward. See README.md.

The names in `__all__` are public; the other imports are for other packages of tp_transformers.
"""

from typing import TYPE_CHECKING

from ..namespaces import lazy_names
from .base import STRATEGY, TensorParallelLayer, batch_sharded, shard_module
from .forward.attach import LocalConfig, attach, block_of, join_layers, wrap_forward
from .linear import ColwiseParallel, PackedColwiseParallel, PackedRowwiseParallel, RowwiseParallel
from .local import GatherParallel
from .registry import STRATEGIES, ParallelInterface, as_strategy
from .replicate import ReplicateParallel, ReplicateSumGradParallel
from .shards.shard import (
    SHARD,
    ParamShard,
    finish_gradient,
    full_tensor,
    layout_of,
    local_tensor,
    shard_of,
    unsharded_like,
)
from .shards.slicing import get_packed_weights, get_tensor_shard, take
from .signature import Signature, State

if TYPE_CHECKING:
    from ..features.expert_parallel.complete import IsolatedParallel
    from ..features.loss_parallel.cross_entropy import vocab_parallel_cross_entropy
    from ..features.sequence.sequence import SequenceParallel
else:  # names of features
    __getattr__, __dir__ = lazy_names(__name__, {})

__all__ = [
    "ColwiseParallel",
    "GatherParallel",
    "IsolatedParallel",
    "PackedColwiseParallel",
    "PackedRowwiseParallel",
    "ParallelInterface",
    "ReplicateParallel",
    "ReplicateSumGradParallel",
    "RowwiseParallel",
    "STRATEGIES",
    "SequenceParallel",
    "Signature",
    "State",
    "TensorParallelLayer",
    "get_packed_weights",
    "get_tensor_shard",
    "vocab_parallel_cross_entropy",
]
