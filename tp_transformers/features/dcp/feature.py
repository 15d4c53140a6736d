"""Checkpoints of torch.distributed.checkpoint: `save_pretrained(folder, distributed_checkpoint=True)`, read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...loading.storage import Storage


class DistributedCheckpoints(Feature):
    """Chunks of tensors, in one file a rank."""

    def storages(self) -> Sequence[type[Storage]]:
        from .storage import ChunkFiles

        return (ChunkFiles,)


FEATURE = DistributedCheckpoints()
