"""Shards that are plain tensors, with the place in the parameter that torch.distributed.checkpoint asks for.

A DTensor has its place. A plain tensor (uneven heads, replicated KV heads) would be saved as if all ranks held the same
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ...slices.layout import Piece
from ...strategies import ParamShard, local_tensor
from ...strategies.parameters.sharded import as_shard, local_values
from ...strategies.parameters.tensors import ShardTensor


class LocalShard(ShardTensor):
    """A shard in a state dict, which says its place in the parameter as torch.distributed.checkpoint asks.

    Values that several ranks hold are saved by the first of them, and loaded by all.
    """

    tp_shard: ParamShard

    @staticmethod
    def of(local: Tensor, shard: ParamShard) -> LocalShard:
        """The values `local` in the place that `shard` gives, in the same memory."""
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
            for chunk in map(self._chunk, self._kept(piece for piece in layout.split.pieces if piece.rank == rank))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(piece) for piece in self._held]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        dim = self._layout.dim
        for piece in self._held:
            if index.offset is None or piece.start == index.offset[dim]:
                return self.plain().narrow(dim, piece.local, piece.length)
        raise ValueError(f"{index.fqn}: this rank holds nothing from {index.offset} on")

    @property
    def _layout(self) -> Any:
        return self.tp_shard.layout

    @property
    def _held(self) -> Iterator[Piece]:
        """The pieces that this rank holds, those that other ranks hold too included."""
        rank, local, pieces = self.tp_shard.group.rank, 0, []
        for start, stop in self._layout.split.ranges[rank]:
            pieces.append(Piece(rank, local, start, stop - start))
            local += stop - start
        return self._kept(pieces)

    def _kept(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The parts of `pieces` that FSDP leaves on this rank, with their places in its shard."""
        start, stop = self.tp_shard.rows if self._layout.dim == 0 else (0, self.tp_shard.local_shape[self._layout.dim])
        for piece in pieces:
            first, last = max(piece.local, start), min(piece.local + piece.length, stop)
            if first < last:
                yield Piece(piece.rank, first - start, piece.start + first - piece.local, last - first)

    def _chunk(self, piece: Piece) -> ChunkStorageMetadata:
        dim, sizes = self._layout.dim, list(self.tp_shard.shape)
        offsets = [0] * len(sizes)
        if dim != 0:
            offsets[0], sizes[0] = self.tp_shard.rows[0], self.tp_shard.rows[1] - self.tp_shard.rows[0]
        offsets[dim], sizes[dim] = piece.start, piece.length
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def placed(local: Tensor, param: Tensor) -> Tensor:
    """`local`, laid out like `param` (itself, an optimizer's state of it), in the form that can be saved as a shard."""
    shard: ParamShard | None = getattr(param, "tp_shard", None)
    if shard is None or shard.layout is None or local.shape != param.shape:
        return local
    # Torch misplaces the rows that FSDP cuts of an uneven DTensor.
    is_even = len(set(shard.layout.split.widths)) == 1
    if shard.placement is not None and (shard.data_parallel is None or is_even):
        return local
    return LocalShard.of(local_tensor(local), shard)


def laid_out(local: Tensor, param: Tensor) -> Tensor:
    """`local`, this rank's values, as a DTensor where `param` is one, else as a plain tensor."""
    if isinstance(param, DTensor):
        layout: dict[str, Any] = {"shape": param.shape, "stride": param.stride(), "run_check": False}
        return DTensor.from_local(local, param.device_mesh, param.placements, **layout)
    return local
