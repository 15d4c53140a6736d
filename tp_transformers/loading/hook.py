"""`enable()` and `disable()`: replace functions of transformers by those of `from_pretrained.py`, and restore them.

Models' classes take as long to import as torch. They are not imported here: their functions are replaced once they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from transformers.models.auto import modeling_auto

from ..patches import MODELS, Patch, Undo, replace_all
from ..seams import added, features
from . import forgotten


def _at_first_call(name: str) -> Callable[..., Any]:
    """A function of `from_pretrained.py`, which needs the whole core: it is imported when transformers calls it."""
    return lambda *args, **kwargs: getattr(import_module(".from_pretrained", __package__), name)(*args, **kwargs)


def _from_pretrained(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    """`from_pretrained` of `from_pretrained.py`, which is imported in the contexts of the features."""
    with ExitStack() as stack:
        if kwargs.get("tp_plan") is not None:
            for feature in features().values():
                stack.enter_context(feature.around_imports(args, kwargs))
        return _at_first_call("from_pretrained")(original, cls, *args, **kwargs)


def _replace_in_auto_classes() -> Undo:
    classes: list[type] = [modeling_auto._BaseAutoModelClass]
    for cls in classes:  # the list grows by the subclasses of each
        classes.extend(cls.__subclasses__())
    return replace_all((cls, "from_pretrained", _from_pretrained) for cls in classes if "from_pretrained" in vars(cls))


def _replace_in_models() -> Undo:
    modeling_utils = sys.modules[MODELS]
    changes = [
        (modeling_utils.PreTrainedModel, "from_pretrained", _from_pretrained),
        (modeling_utils.PreTrainedModel, "_load_pretrained_model", _at_first_call("load_pretrained_model")),
        (modeling_utils, "_get_resolved_checkpoint_files", _at_first_call("resolve_files")),
        (modeling_utils, "get_hf_quantizer", _at_first_call("find_quantizer")),
    ]
    if hasattr(modeling_utils, "get_distributed_checkpoint_dir"):  # since transformers 5.20
        changes.append((modeling_utils, "get_distributed_checkpoint_dir", _at_first_call("find_chunks")))
    return replace_all(changes)


_HOOK = Patch("transformers", "from_pretrained of Auto classes", _replace_in_auto_classes)
_HELD = (_HOOK, Patch("transformers", "from_pretrained", _replace_in_models, module=MODELS), *added("clients"))
"""Held from `enable()` to `disable()`."""


class enable:  # noqa: N801 - used as a function, returns its own context manager
    """Let `from_pretrained(..., tp_plan=...)` load through this package; a second call changes nothing.

    As a context manager it disables itself on exit:

        with tp_transformers.enable():
            model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")

    Raises UnsupportedError if the hook does not fit the installed transformers; nothing is patched then. If nothing has
    imported models' classes yet, the first load raises the error instead.
    """

    def __init__(self) -> None:
        forgotten.CALLED.add("enable")
        self._turned_on = not _HOOK.is_on
        if self._turned_on:
            if MODELS in sys.modules:
                import_module("..transformers_api", __package__).check()
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
