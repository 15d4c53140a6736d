"""Checkpoints of torch.distributed.checkpoint; `save_pretrained(folder, distributed_checkpoint=True)`, read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ...seams import Feature

if TYPE_CHECKING:
    from torch import nn

    from ...loading.storage import Storage


class DistributedCheckpoints(Feature):
    """Chunks of tensors, in one file a rank; states of models and optimizers that torch saves as such."""

    public: ClassVar[Mapping[str, str]] = {
        "checkpoint.load_distributed_checkpoint": ".load",
        "training.load_optimizer_state_dict": ".optimizer_state",
        "training.optimizer_state_dict": ".optimizer_state",
    }
    torch_names: ClassVar[Mapping[str, str]] = {
        "torch.distributed.checkpoint.filesystem._StorageInfo": "torch's checkpoints are not read",
        "torch.distributed.checkpoint.filesystem._StoragePrefix": "torch's checkpoints are not read",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": "torch's checkpoints are not read",
        "torch.serialization._get_layout": "torch's checkpoints are not read",
    }

    def storages(self) -> Sequence[type[Storage]]:
        from .chunks import ChunkFiles

        return (ChunkFiles,)

    def sharded(self, module: nn.Module) -> None:
        from .local_shard import place_in_state

        module.register_state_dict_post_hook(place_in_state)

    def model_methods(self) -> Sequence[type]:
        from .save import DistributedSaves

        return (DistributedSaves,)


FEATURE = DistributedCheckpoints()
