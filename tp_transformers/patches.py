"""Changes to objects of other libraries that the whole process shares; each is undone when nothing needs it.

A patch is held by every tensor-parallel model for as long as it lives, or by `enable()` until `disable()`. The table in
`loading/README.md` has all of them.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from .errors import UnsupportedError, lacks, release
from .logs import get_logger

logger = get_logger(__name__)

Undo = Callable[[], None]
Install = Callable[[], Undo]


class Patch:
    """One change: made for the first holder, undone after the last.

    Where a name that it replaces is missing, the library stays unchanged, and one warning names it. Models that need
    the change are then refused: by `hold_for`, or, where only some calls need it, by those.
    """

    def __init__(
        self, owner: str, name: str, install: Install, *, module: str = "", without: Install | None = None
    ) -> None:
        """Describe a change to `name` of the library `owner`.

        Args:
            owner: name of the library, as it is imported.
            name: the changed names, for messages.
            install: makes the change, and returns its undoing.
            module: the change waits until this module is imported.
            without: makes another change where a name is missing, such as one by `refusing` at the place of use.
        """
        self.owner, self.name = owner, name
        self._install, self._module, self._without = install, module, without
        self._holders = 0
        self._undo: Undo | None = None
        self._logged: set[str] = set()
        self.missing = ""
        """The names that the library lacks, in words; empty where it lacks none."""

    @property
    def is_on(self) -> bool:
        """True while somebody holds it."""
        return self._undo is not None

    def hold(self) -> None:
        """Count one holder more."""
        if self._undo is None:
            self._undo = when_imported(self._module, self._make) if self._module else self._make()
        self._holders += 1

    def hold_for(self, model: object) -> None:
        """Hold until `model` is collected.

        Raises UnsupportedError where a name is missing, unless the place of use refuses by itself.
        """
        self.hold()
        weakref.finalize(model, self.release).atexit = False
        if self.missing and self._without is None:
            self.refuse()

    def release(self) -> None:
        """Count one holder less."""
        self._holders -= 1
        if not self._holders and self._undo is not None:
            undo, self._undo = self._undo, None
            undo()

    def refuse(self) -> NoReturn:
        """Raise UnsupportedError, which names the missing name."""
        raise lacks(self.owner, self.missing, subject=f"{self.name} with a tensor-parallel model")

    def refusing(self, needs: Callable[..., bool]) -> Callable[..., Any]:
        """A replacement, for `without`, which refuses calls with arguments that need the change."""

        def refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if needs(*args, **kwargs):
                self.refuse()
            return original(*args, **kwargs)

        return refuse

    def _make(self) -> Undo:
        self.missing = ""
        try:
            return self._install()
        except _PROBLEMS as error:
            self.missing = str(getattr(error, "problem", error)).partition(" (")[0]  # without the path of a file
        if self.missing not in self._logged and os.environ.get("RANK", "0") == "0":
            logger.warning(
                "%s: %s; tp_transformers leaves %s unchanged, and tensor-parallel models %s",
                *(release(self.owner), self.missing, self.name),
                "do without the change" if self._without is nothing else "that need the change are refused",
            )
        self._logged.add(self.missing)
        with suppress(*_PROBLEMS):
            return (self._without or nothing)()
        return nothing()


def nothing() -> Undo:
    """No change, where models can do without one."""
    return lambda: None


class MissingError(UnsupportedError):
    """A library has no function or method of the name that is to be replaced."""

    def __init__(self, *names: tuple[Any, str]) -> None:
        """The message of `names`, each with its class or module."""
        owner = names[0][0]
        library = getattr(owner, "__module__", owner.__name__).partition(".")[0]
        paths = (f"{getattr(owner, '__qualname__', owner.__name__)}.{name}" for owner, name in names)
        self.problem = f"no {', '.join(paths)}"
        super().__init__(str(lacks(library, self.problem, subject=f"a change of {library}")))


_PROBLEMS = (MissingError, AttributeError, ImportError)

Change = tuple[Any, str, Callable[..., Any]]
"""An owner, the name in it, and the replacement; see `replace`."""


def replace_all(changes: Iterable[Change]) -> Undo:
    """Replace several methods or functions: all of them, or, where one is missing, none; returns the undoing."""
    changes = list(changes)
    missing = [(owner, name) for owner, name, _ in changes if inspect.getattr_static(owner, name, None) is None]
    if missing:
        raise MissingError(*missing)
    undos = [replace(*change) for change in changes]

    def undo_all() -> None:
        for undo in undos:
            undo()

    return undo_all


def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> Undo:
    """Replace a method of a class or a function of a module; returns the undoing.

    `replacement` takes the original function, then its arguments. If another library has wrapped the replacement
    since, undoing leaves that wrapper in place, and the replacement below it calls the original. Raises MissingError
    where `owner` has no such name.
    """
    descriptor = inspect.getattr_static(owner, name, None)
    if descriptor is None:
        raise MissingError((owner, name))
    is_own = name in vars(owner)
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
        if vars(owner).get(name) is not placed:
            return
        if is_own:
            setattr(owner, name, descriptor)
        else:
            delattr(owner, name)

    return undo


def when_imported(name: str, install: Install) -> Undo:
    """Run `install` at once where the module `name` is imported, else when it has been; returns a function that undoes
    either."""
    if name in sys.modules:
        return install()
    waiting = _Waiting(name, install)
    sys.meta_path.insert(0, waiting)
    return waiting.undo


class _Waiting(MetaPathFinder):
    """A finder in `sys.meta_path` that asks those behind it, and runs a function after one module's code."""

    def __init__(self, name: str, install: Install) -> None:
        self._name, self._install = name, install
        self._undo: Undo | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # two that wait for one module would ask each other
        others = (finder.find_spec(name, path, target) for finder in behind)
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
