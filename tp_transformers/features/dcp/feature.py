"""Checkpoints of torch.distributed.checkpoint; `save_pretrained(folder, distributed_checkpoint=True)`, read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from torch import nn


class DistributedCheckpoints(Feature):
    """Chunks of tensors, in one file a rank; states of models and optimizers that torch saves as such."""

    public = {
        "checkpoint.load_distributed_checkpoint": ".load",
        "training.load_optimizer_state_dict": ".optimizer_state",
        "training.optimizer_state_dict": ".optimizer_state",
    }
    torch_names = {
        "torch.distributed.checkpoint.filesystem._StorageInfo": "torch's checkpoints are not read",
        "torch.distributed.checkpoint.filesystem._StoragePrefix": "torch's checkpoints are not read",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": "torch's checkpoints are not read",
        "torch.serialization._get_layout": "torch's checkpoints are not read",
    }
    storages = (".chunks.ChunkFiles",)
    model_methods = (".save.DistributedSaves",)

    def sharded(self, module: nn.Module) -> None:
        from .local_shard import place_in_state

        module.register_state_dict_post_hook(place_in_state)


FEATURE = DistributedCheckpoints()
