"""Failures of one rank outside of collectives: all ranks raise."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...seams import Feature, Option


class WatchOption(Option):
    """False: ranks do not watch one another. A number: seconds until a silent rank counts as lost. None: 10."""

    name = "watch"
    expected, example = "False, or seconds above 0", "60.0"

    def fits(self, value: Any) -> bool:
        return value is None or (isinstance(value, bool | int | float) and (value is False or value > 0))

    def agreed(self, value: Any) -> object:
        return value is not False


class Watching(Feature):
    """Ranks of a model watch one another: `tp_watch`."""

    def options(self) -> Sequence[Option]:
        return (WatchOption(),)

    def around_call(self, model: Any) -> AbstractContextManager[Any]:
        from ...model.failures import fail_together

        return fail_together(model)


FEATURE = Watching()
