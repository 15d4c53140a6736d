"""Copies of a model on different batches: `data_parallel(model, mesh)`, transformers' `DistributedConfig`, FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...seams import RAISES, Feature, Planned


class DataParallelism(Feature):
    """Copies of a model train on different batches."""

    requires = ("watch",)
    public = {"data_parallel": ".data_parallel"}
    torch_names = {
        "torch.autograd.Variable._execution_engine": RAISES,  # averages end with the backward
        "torch.Tensor._post_accumulate_grad_hooks": RAISES,  # hooks that see the gradient of one copy
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state": RAISES,  # calls of modules inside of FSDP's, as all below
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init": RAISES,
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._post_forward": RAISES,
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_forward": RAISES,
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_pre_backward_hook": RAISES,
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._training_state": RAISES,
    }

    def planned(self, arguments: Mapping[str, Any]) -> Planned | None:
        if arguments.get("distributed_config") is None or arguments.get("tp_plan") is not None:
            return None
        from .distributed_config import read_distributed_config

        parallelism = read_distributed_config(arguments)
        return None if parallelism is None else parallelism.load


FEATURE = DataParallelism()
