"""Storage of a load whose weights lie on the ranks of an older model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ...checkpoint.conversion.convert import identity
from ...checkpoint.reading.header import Checkpoint
from ...checkpoint.reading.jobs import Progress, Request
from ...errors import UnsupportedError
from ...loading.storage import Asked, Found, Storage
from ...ranks.group import TensorParallelGroup
from ...transformers_api import LoadStateDictConfig
from .moves import Moves

if TYPE_CHECKING:
    from .described import Described

MOVING: ContextVar[HeldByRanks | None] = ContextVar("tp_transformers_reshard", default=None)
"""The storage of the load that a reshard runs."""


class OfRanks(Checkpoint):
    """The tensors of an older model."""

    def __init__(self, moves: Moves, without: Collection[str]) -> None:
        self.sources = [moves.source]
        self.tensors = {name: tensor for name, tensor in moves.source.tensors.items() if name not in without}


class HeldByRanks(Storage):
    """Tensors by the names of the model's parameters; packed ones by those of a checkpoint."""

    has_own_names = True

    def __init__(self, moves: Moves, described: Described, without: Collection[str]) -> None:
        """`without`: what of the moves is not of the model."""
        self.moves, self.described, self.without = moves, described, without

    @classmethod
    def find(cls, asked: Asked) -> Storage | None:
        return MOVING.get()

    def files(self, original: Callable[..., Any], arguments: Mapping[str, Any], group: TensorParallelGroup) -> Found:
        return [self.moves.source.name], {"dtype": str(self.described.dtype).removeprefix("torch.")}

    def open(self, files: Sequence[str], config: LoadStateDictConfig, *, rank: int) -> Checkpoint:
        return OfRanks(self.moves, self.without)

    def fetch(
        self, reads: Sequence[Request], checkpoint: Checkpoint, group: TensorParallelGroup, progress: Progress
    ) -> None:
        with group.agree():
            for read in reads:
                name = self.moves.source.names[read.tensor.offset]
                if read.destination.dtype != read.tensor.dtype:
                    raise UnsupportedError(
                        f"reshard of {name}",
                        got=f"values of {read.tensor.dtype}",
                        expected=f"{read.destination.dtype}, as a load has them",
                        fix="Cast the complete model by model.to(dtype), or load it anew.",
                    )
        self.moves.round(reads)
        progress(sum(read.tensor.nbytes for read in reads))

    def applied(self, entries: Sequence[Any]) -> Sequence[Any]:
        """Conversions of the load before; `save_pretrained` reverts them."""
        return [entry for entry in entries if identity(entry) in self.described.conversions]

    def origin(self, name: str, files: Sequence[str]) -> Mapping[str, Any]:
        return self.described.source
