"""Check of pickled shards, which know the rank that held them and their indices in the full tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError
from ...strategies.shards.shard import ParamShard, shard_of
from ...strategies.shards.tensors import PICKLED


def check_pickled(value: Any, param: Any, shard: ParamShard, name: str) -> None:
    """Raise CheckpointError if `value`, for the `shard` that `param` is, was pickled by a rank with another shard."""
    pickled = PICKLED.find(value)
    if pickled is None:
        if not (isinstance(value, DTensor) and isinstance(param, DTensor) and value.placements == param.placements):
            return
        theirs, ours = (
            {"rank": mesh.get_coordinate(), "size": tuple(mesh.shape), "indices": None}
            for mesh in (value.device_mesh, param.device_mesh)
        )
        is_own = theirs == ours
    else:
        theirs, ours = pickled, shard.position
        is_own = theirs["indices"] == ours["indices"]
    if not is_own:
        raise CheckpointError(
            f"state of {name}",
            got=f"the shard of rank {theirs['rank']} of {theirs['size']}",
            expected=f"the shard of rank {ours['rank']} of {ours['size']}, or the full tensor",
            fix="torch.save writes the state of one rank: let every rank save and load a file of its own, or save by "
            "save_pretrained and torch.distributed.checkpoint.",
        )


def check_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Before `module` loads a state dict: check the values for sharded parameters."""
    for name, param in module._parameters.items():
        shard, value = shard_of(param), state.get(prefix + name)
        if shard is not None and isinstance(value, Tensor):
            check_pickled(value, param, shard, prefix + name)
