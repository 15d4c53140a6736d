"""Typed access to the attributes that this package sets on objects of other libraries, one `Mark` each.

A mark is defined in the module of its value's type: `tp_strategy` of a module, `tp_shard` of a parameter, `tp_group` of
a model.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Mark(Generic[T]):
    """An attribute called `name`, with values of type T; `Mark[int]("tp_number")`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find(self, owner: object) -> T | None:
        """The value, or None if `owner` has none."""
        return cast("T | None", getattr(owner, self.name, None))

    def of(self, owner: object) -> T:
        """The value. Raises AttributeError if `owner` has none."""
        return cast("T", getattr(owner, self.name))

    def put(self, owner: object, value: T) -> None:
        """Set the value on `owner`."""
        setattr(owner, self.name, value)


def untyped(value: object) -> Any:
    """`value` typed as Any, for attributes that a library sets at run time and does not declare."""
    return value
