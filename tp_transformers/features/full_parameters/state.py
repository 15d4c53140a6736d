"""Full tensors in a state dict that a model loads: each rank takes its shards. The number of full parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...anatomy import check_values
from ...ranks.group import TensorParallelGroup
from ...seams import Mixin, collective
from ...strategies import shard_of, unsharded_like
from ...strategies.shards.tensors import laid_out
from .values import check_pickled, own_shard


class FullModel(Mixin):
    """Methods of a loaded model that take or count full parameters."""

    tp_group: TensorParallelGroup

    @collective
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load full tensors, or the result of `state_dict()` on this rank. Collective."""
        with self.tp_group.agree():
            check_values(self, "load_state_dict")
            return super().load_state_dict(state_dict, *args, **kwargs)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count the parameters of the full model, as in one process."""
        embeddings = {
            param for module in self.modules() if isinstance(module, nn.Embedding) for param in module.parameters()
        }
        return sum(
            unsharded_like(param).numel()
            for param in self.parameters()
            if (param.requires_grad or not only_trainable) and not (exclude_embeddings and param in embeddings)
        )


def load_own_shards(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Before `module` loads a state dict: replace full tensors in the dict by this rank's shards.

    Raises CheckpointError for a shard that another rank has pickled.
    """
    for name, param in module._parameters.items():
        shard, value = shard_of(param), state.get(prefix + name)
        if param is None or shard is None or not isinstance(value, Tensor):
            continue
        check_pickled(value, param, shard, prefix + name)
        local = own_shard(value, shard, param)
        if local is None:
            kind = f"a DTensor of {value.placements}" if isinstance(value, DTensor) else "a tensor"
            errors.append(
                f"size mismatch for {prefix}{name}: got {kind} of shape {tuple(value.shape)}, expected the full "
                f"{tuple(shard.shape)}, or this rank's shard of it."
            )
            state[prefix + name] = param
            continue
        local = local.contiguous()
        if shard.resharded_over is not None:
            state[prefix + name] = nn.Parameter(laid_out(local, param), requires_grad=param.requires_grad)
        else:
            state[prefix + name] = shard.wrap(local, requires_grad=param.requires_grad)
