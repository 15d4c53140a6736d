"""Parameters that a checkpoint lacks: transformers initialises them after our load, then each rank keeps its shard."""

from __future__ import annotations

from torch import nn

from ..anatomy.names import owner_of
from ..plans.bind import Resolution
from ..ranks import direct
from ..ranks.group import TensorParallelGroup
from ..slices.lazy import Resident
from ..strategies import take


def partition_initialized(model: nn.Module, resolution: Resolution, group: TensorParallelGroup) -> None:
    """Shard the parameters that transformers has initialised in full; all ranks take the values of rank 0.

    Together, the shards are the values that one process with rank 0's seed initialises.
    """
    full = [pair for pair in model.named_parameters(remove_duplicate=False) if not hasattr(pair[1], "tp_shard")]
    if full and group.process_group is not None:
        with group.agree():  # a rank that has failed does not join the broadcasts
            distinct = dict.fromkeys(param for _, param in full)
        for param in distinct:
            direct.broadcast(param.data, group.process_group, 0)
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for name, param in full:
        if param not in sharded:
            shard = resolution.shard(name, param.shape, group)
            local = take(Resident(param.data), resolution.layouts.get(name), group.rank).materialize()
            sharded[param] = shard.wrap(local.clone(), requires_grad=param.requires_grad)
        owner, param_type = owner_of(model, name)
        owner._parameters[param_type] = sharded[param]
