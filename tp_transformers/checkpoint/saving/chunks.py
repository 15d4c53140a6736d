"""Shards in one file a rank, in the format of transformers' `save_pretrained(distributed_checkpoint=True)`.

Transformers loads them on any mesh, and so does a load with a plan; see `checkpoint.reading.chunks`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ...ranks.group import GROUP, TensorParallelGroup
from ..reading.chunks import chunk_files
from .dcp import LocalShard
from .machines import on_all_copies
from .save import write_configs
from .writer import make_folder, named

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_chunks(model: PreTrainedModel, folder: Path) -> None:
    """Write each rank's shards to a file of the rank. Collective over all ranks of all copies.

    A file has one chunk of a tensor: a tensor of which a rank holds several ranges (fused projections, heads that ranks
    share) is gathered, and written by one rank.

    Raises CheckpointError if the folder is not writable.
    """
    group: TensorParallelGroup = GROUP.of(model)
    state: dict[str, Tensor] = model.state_dict()

    def prepare() -> None:
        with group.agree():
            if group.writes:
                make_folder(folder)
                with named(folder, "folder"):
                    for file in chunk_files(folder):  # of an earlier save, on more ranks
                        Path(file).unlink()

    def complete() -> None:
        with group.agree():
            if group.writes:
                write_configs(model, folder)

    on_all_copies(group, folder, prepare, writes=group.writes)
    chunks = {name: _in_one_chunk(value) for name, value in state.items()}
    ranks = None if group.mesh is None or group.mesh.size() == dist.get_world_size() else group.process_group
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    save(chunks, storage_writer=writer, process_group=ranks, no_dist=group.process_group is None)
    on_all_copies(group, folder / "config.json", complete, writes=group.writes)


def _in_one_chunk(value: Any) -> Any:
    """Gather a shard of which any rank holds several ranges of indices. Collective over the ranks of the shard."""
    if not isinstance(value, LocalShard):
        return value
    layout = value.tp_shard.layout
    assert layout is not None
    ranges = Counter(entry.rank for entry in layout.split.shard_ranges)
    return value.tp_shard.full(value.plain()) if max(ranges.values(), default=0) > 1 else value
