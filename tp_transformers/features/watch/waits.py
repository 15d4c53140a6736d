"""Warnings about ranks that have not made the call in which this rank waits.

Each rank publishes its position in the store, if it has begun no collective between two polls. A rank that has waited
in a collective for PATIENCE seconds logs the positions of the ranks that are not in the call: they may come later. If
all ranks wait in different calls, they are deadlocked: an error on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ...logs import get_logger
from ...ranks.group import TensorParallelGroup
from ..places.place import Place, here
from .failure import Failure
from .poller import BEAT

logger = get_logger(__name__)

PATIENCE = 10.0
"""Seconds in a collective until a rank logs the missing ranks; each further warning comes after twice the time.
Longer than `group.HEARTBEAT`, the time between the collectives of ranks that wait for jobs."""


class Waits:
    """Publishes the position of this rank for a watch, and reads those of the other ranks."""

    def __init__(self, group: TensorParallelGroup, store: Store, *, is_of_copies: bool = False) -> None:
        """`store` is the store of the watch. Nothing is published before `look`.

        `is_of_copies`: the ranks wait for one another where copies average gradients, not in other collectives.
        """
        self.group, self._store, self._is_of_copies = group, store, is_of_copies
        self._is_world = group.size == dist.get_world_size()
        self._count, self._published = -1, ""
        self._since = self._next = 0.0
        self._received: dict[int, tuple[str, float]] = {}
        self._beats: dict[int, tuple[int, float]] = {}

    def look(self, now: float, count: int) -> Failure | None:
        """Publish the position of this rank and log missing ranks; returns the failure if no rank can go on.

        `count` is the number of collectives that this rank has begun.
        """
        has_moved, self._count = count != self._count, count
        place = None if has_moved else here(for_copies=self._is_of_copies)
        message = json.dumps(asdict(place)) if place is not None else ""
        if message != self._published:
            self._store.set(f"place {self.group.rank}", message)
            self._published = message
        if place is None or not place.waits or not place.call:
            self._since, self._next = now, PATIENCE
            self._received.clear()
            return None
        places, since = self._other_places(now)
        if now - self._since < PATIENCE:
            return None
        missing = {rank: peer for rank, peer in places.items() if peer.call != place.call}
        all_wait = len(places) == self.group.size - 1 and all(peer.waits for peer in places.values())
        if missing and all_wait and self._is_world:  # else a rank may wait for ranks outside the group, which may come
            return self._stuck(place, missing) if now - since >= PATIENCE else None
        if missing and now - self._since >= self._next:
            self._next *= 2
            _warn(place, missing, now - self._since, self.group.global_ranks)
        return None

    def _other_places(self, now: float) -> tuple[dict[int, Place], float]:
        """Positions of the other ranks that are alive but begin no collectives, and the time of the last change."""
        for rank in range(self.group.size):
            key = f"place {rank}"
            if rank != self.group.rank and self._store.check([key]):
                message, beat = self._store.get(key).decode(), self._store.add(beat_of(rank), 0)
                if message != self._received.get(rank, ("", now))[0]:
                    self._received[rank] = message, now
                if beat != self._beats.get(rank, (0, now))[0]:
                    self._beats[rank] = beat, now
        live = {rank for rank, (beat, seen_at) in self._beats.items() if beat > 0 and now - seen_at < 6 * BEAT}
        stopped = {
            rank: Place(**json.loads(message))
            for rank, (message, _) in self._received.items()
            if message and rank in live
        }
        return stopped, max((since for _, since in self._received.values()), default=now)

    def _stuck(self, place: Place, missing: Mapping[int, Place]) -> Failure:
        rank, peer = next(iter(missing.items()))
        ranks = self.group.global_ranks
        return Failure(
            ranks[rank],
            f"has not called {place.call}: it waits in {_named(peer)}, while rank {ranks[self.group.rank]} waits in "
            f"{_named(place)}. All ranks of a model have to make the same calls: call {place.call} on all of them",
            is_of_all=True,
        )


def beat_of(rank: int) -> str:
    """The key of a rank's heartbeat counter in the store of a watch."""
    return f"beat {rank}"


def _named(place: Place) -> str:
    return f"{place.call or 'a collective'} ({place.line})"


def _warn(place: Place, missing: Mapping[int, Place], seconds: float, ranks: list[int]) -> None:
    names = " and ".join(str(ranks[rank]) for rank in missing)
    where = "; ".join(
        f"rank {ranks[rank]} is alive, {f'in {_named(peer)}' if peer.call else f'at {peer.line}'}"
        for rank, peer in missing.items()
    )
    logger.warning(
        "%s (%s) has waited %.0f s for rank%s %s, which %s not called it: %s. All ranks of a model have to call it.",
        *(place.call, place.line, seconds, "s" * (len(missing) > 1), names, "have" if len(missing) > 1 else "has"),
        where,
    )
