"""The steps of shared memory and of the watch as a model: all interleavings of ranks, with kills at any point.

A rank runs a list of steps; a copy takes two, so that others run in its midst. It holds in every state:

    no rank reads what another still writes, or what belongs to another collective
    no rank waits for ever
    all ranks that raise name the same failed rank
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest


class Step(NamedTuple):
    """One step of a rank."""

    kind: str
    """"write" and "read" begin a copy, which the next step ends; "publish" counts up, "wait" is for all counters."""
    cells: tuple[tuple[int, int, int], ...] = ()
    """(rank, slot, share of it)."""
    number: int = 0
    """Of the collective, and twice as many for its second step; or the counter."""


def steps(rank: int, size: int, collectives: str, *, early: bool = False, slots: int = 2) -> list[Step]:
    """What a rank does in `collectives`: "s"mall ones of one step, "l"arge ones of two.

    `early`: the counter is published before the copy. `slots`: between which a rank alternates.
    """
    made, count, others = [], 0, [other for other in range(size) if other != rank]

    def step(written: Sequence[int], read: Callable[[int], Sequence[int]]) -> None:
        nonlocal count
        count += 1
        write = [Step("write", tuple((rank, slot, share) for share in written), count), Step("written")]
        publish = [Step("publish", number=count)]
        made.extend([*publish, *write] if early else [*write, *publish])
        made.append(Step("wait", number=count))
        for other in others:
            made.extend([Step("read", tuple((other, slot, share) for share in read(other)), count), Step("have read")])

    for number, kind in enumerate(collectives):
        slot = number % slots
        if kind == "s":
            step(range(size), lambda _: range(size))
        else:
            step(range(size), lambda _: [rank])
            step([rank], lambda other: [other])
    return made


RUNS, DONE, RAISED, DEAD = "runs", "done", "raised", "dead"


class Rank(NamedTuple):
    """Where a rank is."""

    at: int = 0
    status: str = RUNS
    named: int = -1
    """The failed rank that it names."""


@dataclass
class Model:
    """Ranks with their steps; `kills`: how many of them may die."""

    programs: Sequence[Sequence[Step]]
    kills: int = 0
    notices: bool = True
    """Waiting ranks look whether the others' processes have ended."""
    store: bool = True
    """The first report stands; else each rank names what it has seen itself."""

    def __post_init__(self) -> None:
        self.counts = [[0] for _ in self.programs]
        """The counter of each rank before each of its steps."""
        self.contents: list[list[dict[tuple[int, int, int], int | None]]] = [[{}] for _ in self.programs]
        """What its cells contain; None in the midst of a copy."""
        for rank, program in enumerate(self.programs):
            for place, step in enumerate(program):
                self.counts[rank].append(step.number if step.kind == "publish" else self.counts[rank][-1])
                contents = dict(self.contents[rank][-1])
                if step.kind == "write":
                    contents |= dict.fromkeys(step.cells, None)
                elif step.kind == "written":
                    begun = program[place - 1]
                    contents |= dict.fromkeys(begun.cells, begun.number)
                self.contents[rank].append(contents)

    def explore(self) -> tuple[int, str]:
        """(number of states, the first fault or "")."""
        first = (tuple(Rank() for _ in self.programs), -1)
        seen, left = {first}, [first]
        while left:
            state = left.pop()
            fault, following = self.fault(state[0]), list(self.following(*state))
            waits = [rank for rank, own in enumerate(state[0]) if own.status == RUNS]
            if not fault and waits and not any(self.moves(state, other) for other in following):
                fault = f"rank {waits[0]} waits for ever"
            if fault:
                return len(seen), fault
            new = [other for other in following if other not in seen]
            seen.update(new)
            left.extend(new)
        return len(seen), ""

    @staticmethod
    def moves(state: Any, other: Any) -> bool:
        """True unless all that happened is that a rank died."""
        return any(
            own.status == RUNS and now.status != DEAD and own != now
            for own, now in zip(state[0], other[0], strict=True)
        )

    def following(self, ranks: tuple[Rank, ...], verdict: int) -> Iterator[tuple[tuple[Rank, ...], int]]:
        def at(rank: int, now: Rank, named: int = verdict) -> tuple[tuple[Rank, ...], int]:
            return (*ranks[:rank], now, *ranks[rank + 1 :]), named

        dead = sum(own.status == DEAD for own in ranks)
        for rank, own in enumerate(ranks):
            if own.status != RUNS:
                continue
            if dead < self.kills:
                yield at(rank, own._replace(status=DEAD))
            step = self.programs[rank][own.at]
            behind = [
                other
                for other in range(len(ranks))
                if step.kind == "wait" and other != rank and self.counts[other][ranks[other].at] < step.number
            ]
            if step.kind == "write" and verdict >= 0:  # it may learn of it before it begins
                yield at(rank, Rank(own.at, RAISED, verdict))
            if not behind:
                is_last = own.at + 1 == len(self.programs[rank])
                yield at(rank, Rank(own.at + 1, DONE if is_last else RUNS))
            elif verdict >= 0:  # the watch has ended the collectives
                yield at(rank, Rank(own.at, RAISED, verdict))
            elif self.notices:
                failed = (DEAD,) if self.store else (DEAD, RAISED)
                for other in behind:
                    if ranks[other].status in failed:
                        yield at(rank, Rank(own.at, RAISED, other), other if self.store else -1)

    def fault(self, ranks: tuple[Rank, ...]) -> str:
        """What is wrong in a state."""
        if len({own.named for own in ranks if own.status == RAISED}) > 1:
            return "ranks name several"
        for rank, own in enumerate(ranks):
            step = self.programs[rank][own.at - 1] if own.at else None
            if step is None or step.kind != "read" or own.status != RUNS:
                continue
            for cell in step.cells:
                written = self.contents[cell[0]][ranks[cell[0]].at].get(cell)
                if written != step.number:
                    return f"rank {rank} reads {'what is being written' if written is None else 'another collective'}"
        return ""


def model(
    size: int, collectives: str, *, kills: int = 0, notices: bool = True, store: bool = True, **how: Any
) -> Model:
    return Model([steps(rank, size, collectives, **how) for rank in range(size)], kills, notices, store)


@pytest.mark.parametrize(
    ("size", "collectives", "kills"),
    [(2, "ssss", 2), (2, "lsls", 2), (3, "ss", 2), (3, "ls", 1), (4, "s", 2)],
)
def test_no_interleaving_breaks_the_protocol(size, collectives, kills) -> None:
    states, fault = model(size, collectives, kills=kills).explore()
    print(states)
    assert not fault
    assert states > 100


@pytest.mark.parametrize(
    ("fault", "size", "collectives", "how"),
    [
        ("reads what is being written", 2, "ss", {"early": True}),
        ("reads", 2, "ss", {"slots": 1}),
        ("waits for ever", 2, "s", {"kills": 1, "notices": False}),
        ("name several", 4, "s", {"kills": 2, "store": False}),
    ],
    ids=["a counter before the copy", "one slot", "nobody looks for ended processes", "no first report"],
)
def test_a_wrong_protocol_is_found(fault, size, collectives, how) -> None:
    assert fault in model(size, collectives, **how).explore()[1]
