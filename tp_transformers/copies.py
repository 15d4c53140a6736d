"""Objects that can be copied but not pickled, since they refer to process groups.

Python calls `__reduce_ex__` for both. A `__deepcopy__` would not do: `copy.deepcopy` looks it up on the instance, so
that a wrapper that forwards unknown attributes (PEFT's, torch.compile's) would be copied as its inner object.
"""

from __future__ import annotations

from typing import Any

from .errors import UnsupportedError


def copied_only(owner: object, subject: str, got: str, shared: tuple[object, ...] = ()) -> tuple[Any, ...]:
    """The result for `owner.__reduce_ex__`: `copy` makes an object of the same class, `pickle` raises UnsupportedError.

    Args:
        owner: an object with a `__getstate__`.
        subject: subject of the error; `got` names the object to pickle.
        shared: objects that a deep copy shares with the original.
    """
    state: Any = owner.__getstate__() if hasattr(owner, "__getstate__") else vars(owner)  # object's own: Python 3.11
    return _new, (_NoPickle(subject, got, shared), type(owner)), state


def _new(_: _NoPickle, cls: Any) -> Any:
    return cls.__new__(cls)


class _NoPickle:
    """First argument of the reconstruction: supports deep copies, and raises in pickle."""

    def __init__(self, subject: str, got: str, shared: tuple[object, ...]) -> None:
        self.subject, self.got, self.shared = subject, got, shared

    def __deepcopy__(self, memo: dict[int, Any]) -> _NoPickle:
        memo.update({id(item): item for item in self.shared})
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            self.subject,
            got=self.got,
            expected="its state",
            fix="Call model.save_pretrained(folder) or tp_transformers.save_sharded(model, folder) on all ranks, "
            "or torch.save(model.state_dict(), a file of each rank).",
        )
