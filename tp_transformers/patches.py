"""Changes to objects of other libraries that the whole process shares; each is undone when nothing needs it.

A patch is held by every tensor-parallel model for as long as it lives, or by `enable()` until `disable()`. The table in
`loading/README.md` has all of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

Undo = Callable[[], None]


class Patch:
    """One change: made for the first holder, undone after the last."""

    def __init__(self, owner: str, name: str, install: Callable[[], Undo]) -> None:
        """Describe a change to `name` of the library `owner`; `install` makes it and returns its undoing."""
        self.owner, self.name, self._install = owner, name, install
        self._holders = 0
        self._undo: Undo | None = None

    @property
    def is_on(self) -> bool:
        """True while somebody holds it."""
        return self._undo is not None

    def hold(self) -> None:
        """Count one holder more."""
        if self._undo is None:
            self._undo = self._install()
        self._holders += 1

    def hold_for(self, model: object) -> None:
        """Hold until `model` is collected."""
        self.hold()
        weakref.finalize(model, self.release).atexit = False

    def release(self) -> None:
        """Count one holder less."""
        self._holders -= 1
        if not self._holders and self._undo is not None:
            undo, self._undo = self._undo, None
            undo()


def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> Undo:
    """Replace a method of a class or a function of a module; returns the undoing.

    `replacement` takes the original function, then its arguments. If another library has wrapped the replacement
    since, undoing leaves that wrapper in place, and the replacement below it calls the original.
    """
    descriptor = vars(owner)[name]
    original = getattr(descriptor, "__func__", descriptor)
    is_on = True

    @wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs) if is_on else original(*args, **kwargs)

    placed = patched if original is descriptor else type(descriptor)(patched)
    setattr(owner, name, placed)

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if vars(owner)[name] is placed:
            setattr(owner, name, descriptor)

    return undo


def all_of(undos: Iterable[Undo]) -> Undo:
    """One undoing for several, which are made now and undone in their order."""
    undos = list(undos)

    def undo() -> None:
        for each in undos:
            each()

    return undo


def when_imported(name: str, install: Callable[[], Undo]) -> Undo:
    """Run `install` at once where the module `name` is imported, else when it has been; returns a function that undoes
    either."""
    if name in sys.modules:
        return install()
    waiting = _Waiting(name, install)
    sys.meta_path.insert(0, waiting)
    return waiting.undo


class _Waiting(MetaPathFinder):
    """A finder in `sys.meta_path` that asks the others, and runs a function after one module's code."""

    def __init__(self, name: str, install: Callable[[], Undo]) -> None:
        self._name, self._install = name, install
        self._undo: Undo | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._undo = self._install()

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec

    def undo(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._undo is not None:
            self._undo()
