"""Shards that are plain tensors, with their offsets in the parameter for torch.distributed.checkpoint.

A DTensor knows its offsets. A plain tensor (uneven heads, replicated KV heads) would be saved as if all ranks held the
same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ...slices.layout import ShardRange
from ...strategies import ParamShard, local_tensor
from ...strategies.shards.tensors import ShardTensor, as_shard, local_values


class LocalShard(ShardTensor):
    """A shard in a state dict that gives torch.distributed.checkpoint its offsets in the parameter.

    The first rank that holds a value saves it; every rank that holds it loads it.
    """

    tp_shard: ParamShard

    @staticmethod
    def of(local: Tensor, shard: ParamShard) -> LocalShard:
        """Wrap `local`, in the same memory, as the shard that `shard` describes."""
        return as_shard(local.detach(), LocalShard, shard)  # type: ignore[no-any-return]

    def plain(self) -> Tensor:
        """The same memory as a plain tensor."""
        return local_values(self)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        layout, rank = self._layout, self.tp_shard.group.rank
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.plain()),
                    size=self.tp_shard.shape,
                ),
            )
            for chunk in map(
                self._chunk, self._clipped(entry for entry in layout.split.shard_ranges if entry.rank == rank)
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(entry) for entry in self._local_ranges]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        dim = self._layout.dim
        for entry in self._local_ranges:
            if index.offset is None or entry.start == index.offset[dim]:
                return self.plain().narrow(dim, entry.local, entry.length)
        raise ValueError(f"{index.fqn}: this rank holds nothing from {index.offset} on")

    @property
    def _layout(self) -> Any:
        return self.tp_shard.layout

    @property
    def _local_ranges(self) -> Iterator[ShardRange]:
        """The ranges that this rank holds, including those that other ranks hold too."""
        return self._clipped(self._layout.split.held(self.tp_shard.group.rank))

    def _clipped(self, ranges: Iterable[ShardRange]) -> Iterator[ShardRange]:
        """Clip `ranges` to the rows that FSDP leaves on this rank, with offsets in its FSDP shard."""
        start, stop = self.tp_shard.rows if self._layout.dim == 0 else (0, self.tp_shard.local_shape[self._layout.dim])
        for entry in ranges:
            first, last = max(entry.local, start), min(entry.local + entry.length, stop)
            if first < last:
                yield ShardRange(entry.rank, first - start, entry.start + first - entry.local, last - first)

    def _chunk(self, entry: ShardRange) -> ChunkStorageMetadata:
        dim, sizes = self._layout.dim, list(self.tp_shard.shape)
        offsets = [0] * len(sizes)
        if dim != 0:
            offsets[0], sizes[0] = self.tp_shard.rows[0], self.tp_shard.rows[1] - self.tp_shard.rows[0]
        offsets[dim], sizes[dim] = entry.start, entry.length
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def place_in_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """State-dict hook: replace plain shards by tensors that torch.distributed.checkpoint can save."""
    for name, param in module._parameters.items():
        value = state.get(prefix + name)
        if param is not None and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state[prefix + name] = placed(value, param)


def placed(local: Tensor, param: Tensor) -> Tensor:
    """Wrap `local`, sharded like `param` (the parameter itself or optimizer state of it), so that DCP can save it."""
    shard: ParamShard | None = getattr(param, "tp_shard", None)
    if shard is None or shard.layout is None or local.shape != param.shape:
        return local
    # Torch computes wrong offsets where FSDP shards the rows of an uneven DTensor.
    is_even = len(set(shard.layout.split.widths)) == 1
    if shard.placement is not None and (shard.resharded_over is None or is_even):
        return local
    return LocalShard.of(local_tensor(local), shard)
