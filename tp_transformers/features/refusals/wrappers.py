"""Wrappers that reject a tensor-parallel model: `DistributedDataParallel`, and with it accelerate's `prepare`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import UnsupportedError
from ...patches import Patch, replace
from ...ranks.group import agreed
from ...strategies import SHARD


def _init(original: Callable[..., Any], wrapper: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    shards = filter(None, map(SHARD.find, module.parameters()))
    if any(shard.group.size > 1 for shard in shards):
        raise agreed(
            UnsupportedError(
                "DistributedDataParallel",
                got=f"a tensor-parallel {type(module).__name__}, of which each rank holds a shard",
                expected="an unsharded model on every rank",
                fix="Leave it out: the ranks of one model take the same batch. For copies that train on batches of "
                "their own, load with a mesh that has a dp axis, and call tp_transformers.data_parallel. With "
                "accelerate, do not prepare the model, or pass parallelism_config=ParallelismConfig(tp_size=...).",
            )
        )
    original(wrapper, module, *args, **kwargs)


UNSHARDED_MODELS_ONLY = Patch(
    "torch", "DistributedDataParallel.__init__", lambda: replace(DistributedDataParallel, "__init__", _init)
)
"""Makes DistributedDataParallel, and accelerate's `prepare`, raise for a tensor-parallel model, on all ranks."""
