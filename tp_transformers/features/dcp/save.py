"""`save_pretrained(distributed_checkpoint=True)`: shards in one file a rank, in the format of transformers.

Transformers loads them on any mesh, and so does a load with a plan; see chunks.py.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ...anatomy import check_values
from ...checkpoint.saving.folder import on_all_copies
from ...checkpoint.saving.save import write_configs
from ...checkpoint.saving.writer import make_folder, named
from ...errors import UnsupportedError
from ...ranks.group import TensorParallelGroup
from ...seams import Mixin, collective
from .chunks import chunk_files
from .local_shard import LocalShard


class DistributedSaves(Mixin):
    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, distributed_checkpoint: bool = False, **kwargs: Any
    ) -> None:
        """Write the checkpoint; with `distributed_checkpoint`, each rank writes a file. Collective.

        Raises UnsupportedError for it with packed weights, `push_to_hub`, `state_dict` or `variant`.
        """
        if distributed_checkpoint:
            given = dict(zip(("is_main_process", "state_dict"), args, strict=False))
            self._save_chunks(Path(save_directory), **given, **kwargs)
        else:
            super().save_pretrained(save_directory, *args, **kwargs)

    @collective
    def _save_chunks(self, folder: Path, **given: Any) -> None:
        """Write each rank's shards to a file of the rank. Collective over all ranks of all copies.

        A file has one chunk of a tensor: a tensor of which a rank holds several ranges (fused projections, heads that
        ranks share) is gathered, and written by one rank.

        Raises CheckpointError if the folder is not writable.
        """
        group: TensorParallelGroup = self.tp_group
        with group.agree():
            check_values(self, "distributed_checkpoint")
            for name in ("push_to_hub", "state_dict", "variant"):  # transformers ignores the last two
                if given.get(name) not in (None, False):
                    got, fix = f"distributed_checkpoint with {name}", "Leave out one of them."
                    raise UnsupportedError("save_pretrained", got=got, expected="full tensors", fix=fix)

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
                    write_configs(self, folder)

        on_all_copies(group, folder, prepare, writes=group.writes)
        chunks = {name: _in_one_chunk(value) for name, value in self.state_dict().items()}
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
