"""Attributes of ours on objects of other libraries: typed access to them, each by one `Mark`.

A mark is defined beside the type of its values: `tp_strategy` of a module, `tp_shard` of a parameter,
`tp_group` of a model.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Mark(Generic[T]):
    """An attribute called `name`, with values of type T; `Mark[int]("tp_number")`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find(self, owner: object) -> T | None:
        """The value; None where `owner` has none."""
        return cast("T | None", getattr(owner, self.name, None))

    def of(self, owner: object) -> T:
        """The value. Raises AttributeError where `owner` has none."""
        return cast("T", getattr(owner, self.name))

    def put(self, owner: object, value: T) -> None:
        """Give `owner` the value."""
        setattr(owner, self.name, value)


def untyped(value: object) -> Any:
    """`value`, with attributes that its type does not declare: those that a library sets at run time."""
    return value
