"""The moves of tensors between the ranks of an old and of a new model, one tensor after the other.

All ranks of both take part in a round: each says which slices it wants, so that all find the same sources by
themselves. Of each tensor, a rank then sends one message to each rank that needs some of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ...checkpoint.reading.jobs import Request
from ...errors import RemoteRankError, UnsupportedError
from ...ranks.group import TensorParallelGroup, agreed
from ...slices.layout import Range
from ...slices.lazy import Resident
from ...slices.stored import Selection, Source, Stored
from .pieces import CHECKPOINT, Piece
from .table import Table

Read = Callable[[str, Selection], Tensor]
"""Reads a slice of a tensor from the checkpoint."""


class RanksSource(Source):
    """The tensors of a table as if they lay in one file, which only `Moves` can read."""

    name, is_remote = "the ranks of the model", True

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.tensors: dict[str, Stored] = {}
        self.names: dict[int, str] = {}
        self.size = 0
        for name, entry in table.items():
            self.tensors[name] = Stored(self, offset=self.size, shape=entry.shape, dtype=entry.dtype)
            self.names[self.size] = name
            self.size += max(entry.nbytes, 1)

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        raise UnsupportedError("reshard", got="a conversion", expected="parameters as they are", fix="Load it anew.")

    def close(self) -> None:
        """There is nothing to release."""


@dataclass(frozen=True)
class _Move:
    """A piece for one request of a rank."""

    receiver: int
    request: int
    piece: Piece
    selection: Selection


@dataclass
class Moves:
    """The rounds of one reshard. Collective: all ranks of `union` call the same methods, in the same order."""

    union: TensorParallelGroup
    table: Table
    old: Mapping[int, int]
    """Rank -> its rank in the old group, for those that hold the old model."""
    values: dict[str, Callable[[], Tensor]]
    """This rank's old shards."""
    free: Callable[[str], None]
    """Called with the name of each tensor that no rank needs any more."""
    read: Read | None
    """Set if no rank holds some of the old model."""
    sent: Counter[int] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    """Bytes that this rank has got: "here", "ranks", "checkpoint"."""

    has_begun = False
    """True once something may be changed."""
    has_failed = False
    """True if all ranks know of a failure."""

    def __post_init__(self) -> None:
        self.source = RanksSource(self.table)

    def serve(self) -> None:
        """Take part in the rounds of ranks that get a model, until these are `done`."""
        while not self._say("serves", []):
            pass

    def done(self) -> None:
        self._say("done", [])

    def failed(self, error: Exception) -> None:
        """Tell the ranks that serve that those which get a model have failed, unless they know."""
        if not self.has_failed:
            self._say(f"failed: {error}", [])

    def round(self, requests: Sequence[Request]) -> None:
        """Fill the destinations of the requests, which are slices of tensors of `source`."""
        self._say("reads", requests)

    def _say(self, state: str, requests: Sequence[Request]) -> bool:
        """One round; returns True if the ranks that get a model are done. Raises RemoteRankError if they failed."""
        for request in requests:
            if request.tensor.stored_shape != self.table[self.source.names[request.tensor.offset]].shape:
                raise AssertionError("a reshaped tensor")
        asked = [(self.source.names[request.tensor.offset], request.tensor.selection) for request in requests]
        answers = self.union.gather((state, asked))
        states = [state for state, _ in answers if state != "serves"]
        failure = next((state for state in states if state.startswith("failed")), None)
        if failure is not None:
            if state.startswith("failed"):
                return True
            self.has_failed = True
            raise agreed(RemoteRankError(failure))
        wanted: dict[str, list[tuple[int, int, Selection]]] = defaultdict(list)
        for rank, (_, names) in enumerate(answers):
            for index, (name, selection) in enumerate(names):
                wanted[name].append((rank, index, selection))
        self.has_begun = self.has_begun or bool(wanted)
        try:
            with self.union.agree(), torch.no_grad():
                for name in (name for name in self.table if name in wanted):
                    self._move(name, list(self._plan(name, wanted[name])), requests)
                    self.free(name)
        except Exception:
            self.has_failed = True
            raise
        return "done" in states

    def _plan(self, name: str, wanted: Sequence[tuple[int, int, Selection]]) -> Iterator[_Move]:
        """All moves of a tensor, the same on all ranks."""
        entry = self.table[name]
        for rank, index, selection in wanted:
            for piece in entry.sources({rank: selection}, self.old, self.sent)[rank]:
                if entry.bytes_of(selection, piece):
                    yield _Move(rank, index, piece, selection)

    def _move(self, name: str, moves: Sequence[_Move], requests: Sequence[Request]) -> None:
        """Send, receive and copy the pieces of one tensor."""
        entry, own = self.table[name], self.union.rank
        readers = self._readers(moves)
        ways: dict[tuple[int, int], list[_Move]] = defaultdict(list)
        for move in moves:
            ways[readers.get(move, move.piece.source), move.receiver].append(move)
        device, messages, tasks = self.union.device, {}, []
        with self.union.agree():  # a rank that cannot read, or lacks memory, lets no other rank wait for a message
            read = {move: self._read(name, move) for move, reader in readers.items() if reader == own}
            local = self.values[name]() if any(own == way[0] for way in ways) and name in self.values else None
            if local is not None and local.ndim == 0:
                local = local.view(1)
            blocks = {
                move: read[move] if move in read else _block(local, move, entry.dim)
                for (sender, _), of_way in ways.items()
                for move in of_way
                if sender == own
            }
            for (sender, receiver), of_way in ways.items():
                if sender == receiver or own not in (sender, receiver):
                    continue
                if sender == own:
                    parts = [blocks[move].to(device).contiguous().view(-1).view(torch.uint8) for move in of_way]
                    message = parts[0] if len(parts) == 1 else torch.cat(parts)
                    tasks.append(dist.P2POp(dist.isend, message, receiver))
                else:
                    nbytes = sum(entry.bytes_of(move.selection, move.piece) for move in of_way)
                    message = torch.empty(nbytes, dtype=torch.uint8, device=device)
                    tasks.append(dist.P2POp(dist.irecv, message, sender))
                    messages[sender] = message
        for work in dist.batch_isend_irecv(tasks) if tasks else ():
            work.wait()
        for (sender, receiver), of_way in ways.items():
            position = 0
            for move in of_way if receiver == own else ():
                nbytes = entry.bytes_of(move.selection, move.piece)
                destination = requests[move.request].destination
                destination = destination if destination.ndim else destination.view(1)
                place = destination.narrow(entry.dim, move.piece.at, move.piece.length)
                block = blocks.get(move) if sender == own else None
                if block is None:
                    part = messages[sender][position : position + nbytes]
                    block = part.clone().view(entry.dtype).view(place.shape)
                    position += nbytes
                place.copy_(block)
                is_read = move.piece.source == CHECKPOINT
                self.counts["checkpoint" if is_read else "here" if sender == own else "ranks"] += nbytes

    def _readers(self, moves: Sequence[_Move]) -> dict[_Move, int]:
        """The rank that reads each piece from the checkpoint: the rank that wants it, if it had the old model."""
        others = sorted(self.old)
        return {
            move: move.receiver if move.receiver in self.old else others[index % len(others)]
            for index, move in enumerate(moves)
            if move.piece.source == CHECKPOINT
        }

    def _read(self, name: str, move: _Move) -> Tensor:
        assert self.read is not None
        ranges = [*move.selection]
        if ranges:
            ranges[self.table[name].dim] = ((move.piece.start, move.piece.start + move.piece.length),)
        return self.read(name, tuple(ranges)).to(self.table[name].dtype)


def _block(local: Tensor | None, move: _Move, dim: int) -> Tensor:
    """The values of a piece in the shard of its source."""
    assert local is not None
    piece, value = move.piece, Resident(local)
    for other, ranges in enumerate(move.selection):
        of_dim: Sequence[Range] = ranges if other != dim else [(piece.local, piece.local + piece.length)]
        if tuple(of_dim) != ((0, local.shape[other]),):
            value = value.select(other, of_dim)
    return value.tensor
