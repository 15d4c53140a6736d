"""`reshard(model, 3)`: a model that is loaded on n ranks becomes the same model on 3, in the same processes."""

from __future__ import annotations

import pickle
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...checkpoint.saving.save import STORED_FORM
from ...errors import CheckpointError, MeshError, UnsupportedError, shown
from ...errors import size as in_bytes
from ...loading.hook import enable
from ...logs import get_logger
from ...marks import Mark
from ...model.dropout import set_random_states
from ...ranks.group import GROUP, TP_AXIS, TensorParallelGroup
from ...ranks.mesh import join
from .described import Described, Moved, check_supported
from .loaded import forget, is_changed
from .lost import LostWeights
from .moves import Moves
from .optimizer import OptimizerStates, States
from .storage import MOVING, HeldByRanks
from .table import OldModel, Table

logger = get_logger(__name__)

To = int | Sequence[float] | DeviceMesh


@dataclass(frozen=True)
class ReshardReport:
    """What this rank got of a resharded model, in bytes by their source."""

    here: int
    """Copied on this rank."""
    ranks: int
    """Sent by other ranks."""
    checkpoint: int
    """Held by no rank any more."""
    bytes_read: int
    """Bytes that this rank read from the checkpoint, for itself or for ranks that joined; without headers."""
    seconds: float


REPORT: Mark[ReshardReport] = Mark("tp_reshard_report")
"""On a resharded model."""


def reshard(model: Any, to: To, *, checkpoint: str | None = None) -> Any:
    """Turn a model that is loaded on some ranks into the same model on others. Collective over all ranks.

    All ranks of the default process group call it. The result is as one that `from_pretrained` loads there, with the
    plan, options, values and modes of the old model. The old model cannot be used any more: each of its tensors is
    freed as soon as it is moved. Hooks that a user has set, caches and compiled forwards stay behind.

    Args:
        model: the loaded model; None on a rank that has none.
        to: the number of ranks, which are the first of the default group; or the share of each of them, as `tp_shares`;
            or a DeviceMesh of one axis.
        checkpoint: the folder of a save with the values of now, to read what only a lost rank held. None: the
            checkpoint of the load, if the weights are as they were loaded.

    Returns the new model; None on a rank that is not among the new ones.

    Raises, on all ranks, before anything is changed:
        UnsupportedError: for a model with adapters, with copies, or with gradients.
        MeshError: no rank has a model, or there are fewer ranks than asked for.
        CheckpointError: a lost rank held the only copy of values that were changed, or that the checkpoint lacks.
    """
    return Reshard(model, None, to, checkpoint).run()[0]


@dataclass(frozen=True)
class _Old:
    """The old model, as all ranks see it."""

    ranks: Mapping[int, int]
    """Rank -> its rank in the old group."""
    size: int
    described: Described
    table: Table
    states: States | None
    changed: frozenset[str]
    """Parameters that were written to since they were loaded."""


class Reshard:
    """One reshard, seen from one rank."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer | None, to: To, checkpoint: str | None) -> None:
        """Find the ranks, old and new. Collective; raises as `reshard`."""
        self.model, self.optimizer, self.checkpoint = model, optimizer, checkpoint
        self.began = perf_counter()
        self.union = union = join()
        with union.agree() as holders:
            if model is not None:
                check_supported(model)
                group = GROUP.of(model)
                holders.append((union.rank, group.rank, group.size, STORED_FORM.find(model) is not None))
            self.new, self.shares, mesh = _new_ranks(to, union)
        if not holders or len({held[2:] for held in holders}) > 1 or len({held[1] for held in holders}) < len(holders):
            got = "no model on any rank" if not holders else "different models"
            raise MeshError("reshard", got=got, expected="the ranks of one model", fix="Pass None on all other ranks.")
        ranks = self.shares or (*self.new,)
        union.check_same({"to": ranks, "to as a mesh": mesh is not None, "checkpoint=": checkpoint is not None})
        self.old_ranks = {rank: was for rank, was, _, _ in holders}
        self.old_size, is_packed = holders[0][2:]
        if is_packed and len(holders) < self.old_size:
            got = f"packed weights, and {len(holders)} of {self.old_size} ranks that held them"
            fix = "Load the model anew on the ranks that are left."
            raise UnsupportedError("reshard", got=got, expected="all of the old ranks", fix=fix)
        if mesh is None:
            mesh = union.device_mesh
            if len(self.new) < union.size:
                mesh = DeviceMesh(union.device.type, [*self.new], mesh_dim_names=(TP_AXIS,))
        self.mesh = mesh

    def run(self) -> tuple[Any, torch.optim.Optimizer | None]:
        """Move the model, then the optimizer's states; returns both."""
        with ExitStack() as stack:
            held, states, old = self._old()
            values = {} if held is None else held.values
            lost = self._open_lost(old, values, stack)

            def free(name: str) -> None:
                if states is not None:
                    states.take()
                if held is not None:
                    held.free(name)

            moves = Moves(self.union, old.table, old.ranks, values, free, lost.read if lost is not None else None)
            try:
                if self.union.rank in self.new:
                    model, optimizer = self._load(moves, old)
                else:
                    model = optimizer = None
                    moves.serve()
            finally:
                if moves.has_begun and self.model is not None:
                    Moved.leave(self.model)
            read = lost.bytes_read if lost is not None else 0
        if model is not None:
            self._report(model, moves, old, read)
        return model, optimizer

    def _old(self) -> tuple[OldModel | None, OptimizerStates | None, _Old]:
        """Find the tensors of the old model, and of its optimizer, on this rank, and tell all ranks of them."""
        first, held, states = min(self.old_ranks), None, None
        with self.union.agree() as told:
            if self.model is not None:
                held = OldModel(self.model)
                states = None if self.optimizer is None else OptimizerStates(self.optimizer, held)
                table, moved = held.table, None if states is None else states.states
                changed = {name for name, tensor in held.dense.items() if is_changed(tensor)}
                described = Described.of(self.model)
                message = b""
                if self.union.rank == first and len(self.old_ranks) < self.union.size:
                    message = pickle.dumps((described, table, moved))
                told.append((zlib.crc32(repr((table, moved and moved.groups)).encode()), changed, message))
        if len({digest for digest, _, _ in told}) > 1:
            fix = "Pass the model and the optimizer of the same step on all ranks."
            raise MeshError("reshard", got="different tensors on the ranks", expected="those of one model", fix=fix)
        with self.union.agree():
            if held is None:
                described, table, moved = pickle.loads(next(message for _, _, message in told if message))
            if moved is not None:
                moved.made([torch.zeros(1)])  # as a rank that joins makes one
        everywhere = frozenset[str]().union(*(changed for _, changed, _ in told))
        return held, states, _Old(self.old_ranks, self.old_size, described, table, moved, everywhere)

    def _open_lost(self, old: _Old, values: Mapping[str, Callable[[], Tensor]], stack: ExitStack) -> LostWeights | None:
        """Open the checkpoint if no rank holds some of the old model; None on ranks that did not have the old model."""
        lost = {name: entry for name, entry in old.table.items() if entry.lost(old.ranks)}
        if not lost:
            return None
        trained = next((name for name in lost if name in old.changed and self.checkpoint is None), None)
        states = old.states.names if old.states is not None else ()
        only = trained or next((name for name in lost if name in states), None)
        if only is not None:
            raise CheckpointError(
                f"reshard from {old.size} ranks, of which {len(old.ranks)} are left",
                got=f"values of {only} that only a lost rank had, and that were changed since the load",
                expected="values that the checkpoint has",
                fix="Pass checkpoint=, the folder of a save of this step; or load such a save, with its optimizer.",
            )
        with self.union.agree():
            if self.model is None:
                return None
            return LostWeights(old.described, self.checkpoint, lost, values, old.ranks[self.union.rank], stack)

    def _load(self, moves: Moves, old: _Old) -> tuple[Any, torch.optim.Optimizer | None]:
        """Load the new model from the ranks."""
        described = old.described
        plan = replace(described.plan, shares=None)
        shares = {"tp_shares": self.shares} if self.shares is not None else {}
        states = old.states.names if old.states is not None else ()
        token = MOVING.set(HeldByRanks(moves, described, states))
        try:
            with tempfile.TemporaryDirectory() as empty, enable():
                model = described.cls.from_pretrained(  # type: ignore[attr-defined]
                    empty,
                    config=described.config,
                    dtype=described.dtype,
                    tp_plan=plan,
                    device_mesh=self.mesh,
                    **described.options,
                    **shares,
                )
            described.put_into(model)
            for name, param in model.named_parameters(remove_duplicate=False):
                if name in old.changed:
                    forget(param)
            optimizer = None if old.states is None else old.states.restore(self.optimizer, model, moves)
            set_random_states(GROUP.of(model).device, described.random_states)
        except Exception as error:
            moves.failed(error)
            raise
        finally:
            MOVING.reset(token)
        moves.done()
        return model, optimizer

    def _report(self, model: Any, moves: Moves, old: _Old, read: int) -> None:
        counts, seconds = moves.counts, perf_counter() - self.began
        report = ReshardReport(counts["here"], counts["ranks"], counts["checkpoint"], read, seconds)
        REPORT.put(model, report)
        logger.info(
            "resharded from %d ranks (%d left) to %d in %.2f s: %s here, %s from ranks, %s from the checkpoint",
            old.size,
            len(old.ranks),
            len(self.new),
            seconds,
            *(in_bytes(count) for count in (report.here, report.ranks, report.checkpoint)),
        )


def _new_ranks(to: To, union: TensorParallelGroup) -> tuple[Sequence[int], tuple[float, ...] | None, DeviceMesh | None]:
    """The new ranks, their shares, and their mesh, if it exists already. Raises MeshError for others than there are."""
    if isinstance(to, DeviceMesh):
        if to.ndim > 1:
            fix = "Pass the tp axis alone."
            raise MeshError("reshard", got=f"a mesh of {to.ndim} axes", expected="one axis", fix=fix)
        return tuple(to.mesh.tolist()), None, to
    shares = None if isinstance(to, int) else tuple(to)
    size = to if isinstance(to, int) else len(to)
    if isinstance(to, bool) or not 1 <= size <= union.size:
        expected = f"1 to {union.size} ranks, as many as there are"
        raise MeshError("reshard", got=shown(to), expected=expected, fix="Start more, or ask for fewer.")
    return range(size), shares, None
