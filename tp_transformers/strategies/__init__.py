"""Strategies: how one module is cut over the ranks, and the communication of its forward. See README.md."""

from .attach import LocalConfig, attach, begun_forward
from .base import TensorParallelLayer, cut_module
from .experts import IsolatedParallel, MoEExpertsParallel
from .linear import ColwiseParallel, PackedColwiseParallel, PackedRowwiseParallel, RowwiseParallel
from .local import GatherParallel
from .regions.batch import BatchStates, batch_sharded, same_inputs
from .regions.batch_blocks import BATCH_SHARDED, BatchGather, BatchWhole
from .regions.sequence import SequenceParallel
from .registry import STRATEGIES, ParallelInterface
from .replicate import ReplicateParallel, ReplicateSumGradParallel
from .shards.shard import (
    ParamShard,
    full_tensor,
    layout_of,
    local_tensor,
    settle_gradient,
    shard_of,
    whole_like,
)
from .shards.slicing import get_packed_weights, get_tensor_shard, take, undo_partition
from .torch_style import as_strategy, style_hint

__all__ = [
    "BATCH_SHARDED",
    "STRATEGIES",
    "BatchGather",
    "BatchStates",
    "BatchWhole",
    "ColwiseParallel",
    "GatherParallel",
    "IsolatedParallel",
    "LocalConfig",
    "MoEExpertsParallel",
    "PackedColwiseParallel",
    "PackedRowwiseParallel",
    "ParallelInterface",
    "ParamShard",
    "ReplicateParallel",
    "ReplicateSumGradParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "TensorParallelLayer",
    "as_strategy",
    "attach",
    "batch_sharded",
    "begun_forward",
    "cut_module",
    "full_tensor",
    "get_packed_weights",
    "get_tensor_shard",
    "layout_of",
    "local_tensor",
    "same_inputs",
    "settle_gradient",
    "shard_of",
    "style_hint",
    "take",
    "undo_partition",
    "whole_like",
]
