"""`enable()` and `disable()`: replace functions of transformers by those of `from_pretrained.py`, and restore them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from ..patches import Patch, Undo, replace_all
from ..seams import added
from ..transformers_api import auto_classes, check, modeling_utils
from . import forgotten


def _at_first_call(name: str) -> Callable[..., Any]:
    """A function of `from_pretrained.py`, which needs the whole core: it is imported when transformers calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        from . import from_pretrained

        return getattr(from_pretrained, name)(*args, **kwargs)

    return call


def _replace_all() -> Undo:
    changes: list[tuple[Any, str, str]] = [
        (PreTrainedModel, "_load_pretrained_model", "load_pretrained_model"),
        (modeling_utils, "_get_resolved_checkpoint_files", "resolve_files"),
        (modeling_utils, "get_hf_quantizer", "find_quantizer"),
        *((cls, "from_pretrained", "from_pretrained") for cls in (PreTrainedModel, *auto_classes())),
    ]
    if hasattr(modeling_utils, "get_distributed_checkpoint_dir"):  # since transformers 5.20
        changes.append((modeling_utils, "get_distributed_checkpoint_dir", "find_chunks"))
    return replace_all((owner, name, _at_first_call(ours)) for owner, name, ours in changes)


_HOOK = Patch("transformers", "from_pretrained", _replace_all)
_HELD = (_HOOK, *added("clients"))
"""Held from `enable()` to `disable()`."""


class enable:  # noqa: N801 - used as a function, returns its own context manager
    """Let `from_pretrained(..., tp_plan=...)` load through this package; a second call changes nothing.

    As a context manager it disables itself on exit:

        with tp_transformers.enable():
            model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")

    Raises UnsupportedError if the hook does not fit the installed transformers; nothing is patched then.
    """

    def __init__(self) -> None:
        forgotten.CALLED.add("enable")
        self._turned_on = not _HOOK.is_on
        if self._turned_on:
            check()
            for patch in _HELD:
                patch.hold()

    def __enter__(self) -> enable:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._turned_on:
            disable()


def disable() -> None:
    """Undo the replacements of `enable()`; loaded models stay as they are.

    Patches of torch that such models need are undone when the last of them is garbage-collected.
    """
    forgotten.CALLED.add("disable")
    if _HOOK.is_on:
        for patch in _HELD:
            patch.release()
