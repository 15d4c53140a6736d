"""The thread that polls: what is added again is polled once."""

from __future__ import annotations

import gc

from tp_transformers.features.watch.poller import Poller


class Counted:
    """What is polled, without a model."""

    is_urgent = False

    def poll(self) -> None:
        """Nothing to look at."""


def test_what_is_added_again_is_polled_once_and_bids_its_last_farewell() -> None:
    poller, polled, farewells = Poller(), Counted(), list[str]()
    try:
        for number in range(3):
            poller.add(polled, lambda number=number: farewells.append(str(number)))
        assert poller.all() == [polled]
        del polled
        gc.collect()
    finally:
        poller._stop()
    assert farewells == ["2"]
