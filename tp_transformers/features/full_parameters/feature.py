"""Sharded parameters that other code, optimizers among it, can use as if they were the full tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...seams import REFUSED, Compute, Feature

if TYPE_CHECKING:
    from torch import nn

    from ...loading.options import Options
    from ...ranks.group import TensorParallelGroup


class FullParameters(Feature):
    """Functions of torch and steps of optimizers on shards, state dicts of full tensors, `training.full_parameters`.

    Embeddings of another size, too.
    """

    public = {
        "training.full_parameters": ".full_parameters",
        "training.parameter_groups": ".optimizers.scopes",
    }
    torch_names = {
        "torch.amp.GradScaler._unscale_grads_": "GradScaler refuses shards",
        "torch.distributed.tensor.distribute_module._distribute_module_applied": REFUSED,  # left out of copies
        "torch.nn.Module._forward_pre_hooks": REFUSED,
        "torch.nn.Module._load_state_dict_pre_hooks": REFUSED,
        "torch.nn.Module._state_dict_hooks": REFUSED,
        "torch.nn.utils.parametrize._maybe_set": "remove_parametrizations raises",
    }
    model_methods = (".embeddings.ResizableModel", ".state.FullModel")
    model_patches = (
        ".values.ASSIGNED_VALUES",
        ".values.FULL_BYTES",
        ".optimizers.step.STEPS_ON_SHARDS",
        ".optimizers.clipping.FULL_NORMS",
        ".optimizers.grad_scaler.SHARED_INFINITIES",
    )

    def computes(self) -> Compute:
        from .computing import compute_on

        return compute_on

    @contextmanager
    def around_load(self, group: TensorParallelGroup, options: Options) -> Iterator[None]:
        from .computing import WRITES_PARTS

        token = WRITES_PARTS.set(True)
        try:
            yield
        finally:
            WRITES_PARTS.reset(token)

    def sharded(self, module: nn.Module) -> None:
        from .state import load_own_shards

        module.register_load_state_dict_pre_hook(load_own_shards)


FEATURE = FullParameters()
