"""Which rank failed first, of what ranks report."""

import pytest

from tp_transformers.features.watch.failure import GRACE, Report, is_identical, judge


def report(order: int, *, follows: bool = False, collectives: int = 3) -> Report:
    return Report(order, collectives, f"ValueError: {order}", "trace", follows)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ({0: report(1), 1: report(2)}, True),
        ({0: report(1)}, False),
        ({0: report(1), 1: report(2, collectives=4)}, False),  # rank 0 will not be in the last collective of rank 1
    ],
)
def test_ranks_failed_alike(reports, expected) -> None:
    assert is_identical(reports, 2) == expected


ALIVE, BEFORE = [5, 5, 5], [1, 1, 1]


@pytest.mark.parametrize(
    ("reports", "now", "seconds", "rank"),
    [
        ({1: report(1)}, ALIVE, GRACE / 2, None),  # the others may fail, too
        ({1: report(1)}, ALIVE, GRACE, 1),
        ({0: report(2), 1: report(1)}, ALIVE, GRACE, 1),
        # An error of its own goes before one of a connection, whichever came first.
        ({0: report(1, follows=True), 2: report(2)}, ALIVE, GRACE, 2),
        # A rank that is not run cannot fail as yet.
        ({1: report(1)}, [5, 5, 1], GRACE, None),
        ({1: report(1)}, [5, 5, 1], 2 * GRACE, 1),
        # All have failed, after different numbers of collectives: nothing to wait for.
        ({0: report(2), 1: report(1, collectives=4), 2: report(3)}, ALIVE, 0.1, 1),
        # Connections broke, and one rank is silent: that one.
        ({0: report(1, follows=True), 2: report(2, follows=True)}, [5, 1, 5], GRACE, 1),
        # Nobody is silent as yet: wait, then believe the first.
        ({0: report(1, follows=True)}, ALIVE, GRACE, None),
        ({0: report(1, follows=True)}, ALIVE, 2 * GRACE, 0),
        # A rank that has said what happened to it need not be alive any more.
        ({0: report(1, follows=True), 1: report(2)}, [5, 1, 5], GRACE, 1),
    ],
)
def test_the_rank_that_failed_first(reports, now, seconds, rank) -> None:
    failure = judge(reports, BEFORE, now, seconds, [0, 1, 2])
    assert (failure.rank if failure is not None else None) == rank
    if failure is not None:
        assert failure.is_lost == (rank not in reports)
        assert failure.is_lost or reports[rank].error in failure.text


def test_the_message_names_the_rank_and_has_its_traceback() -> None:
    failure = judge({1: report(1)}, BEFORE, ALIVE, GRACE, [0, 1, 2])
    message = str(failure.to_error())
    assert message.startswith("rank 1 failed with ValueError: 1. ")
    assert "renew_process_group" in message
    assert message.endswith("Traceback of rank 1:\ntrace")
