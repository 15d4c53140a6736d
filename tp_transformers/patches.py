"""Process-wide patches of other libraries; each is undone when nothing needs it any more.

Every tensor-parallel model holds its patches for its lifetime, and `enable()` until `disable()`. PATCHES.md has
tables of all patches.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from .errors import UnsupportedError, lacks, release
from .logs import get_logger, warn_once
from .torch_api import CompileContext

logger = get_logger(__name__)

MODELS = "transformers.modeling_utils"
"""Module that takes as long to import as torch: a patch waits until a model's class, or a load, imports the module."""

Undo = Callable[[], None]
Install = Callable[[], Undo]


class Patch:
    """One patch, reference-counted: applied for the first holder, undone after the last.

    If a name to replace is missing, the library stays unchanged, and one warning names it. Then `hold_for` raises for
    models that need the patch, or, if only some calls need it, these calls raise.
    """

    def __init__(
        self, owner: str, name: str, install: Install, *, module: str = "", without: Install | None = None
    ) -> None:
        """Describe a patch of `name` in the library `owner`.

        Args:
            owner: import name of the library. name: the patched names, for messages. install: applies the patch, and
            returns a function that undoes it. module: apply the patch only once this module is imported. without:
            applies another patch if a name is missing, such as one that raises at the place of use (`refusing`).
        """
        self.owner, self.name = owner, name
        self._install, self._module, self.without = install, module, without
        self._holders = 0
        self._undo: Undo | None = None
        ALL.append(self)
        self.missing = ""
        """The names that the library lacks, as text; "" if it lacks none."""

    @property
    def is_on(self) -> bool:
        """True while it has holders."""
        return self._undo is not None

    def hold(self) -> None:
        """Add a holder."""
        if self._undo is None:
            self._undo = when_imported(self._module, self._make) if self._module else self._make()
        self._holders += 1

    def hold_for(self, model: object) -> None:
        """Hold until `model` is garbage-collected.

        Raises UnsupportedError if a name is missing, unless `without` handles that at the place of use.
        """
        self.hold()
        weakref.finalize(model, self.release).atexit = False
        if self.missing and self.without is None:
            self.refuse()

    def release(self) -> None:
        """Remove a holder.

        A model may be garbage-collected while torch.compile traces another, and its guards would look for names that
        are gone: patches without holders then stay until the next release.
        """
        self._holders -= 1
        _released.append(self)
        while _released and CompileContext.try_get() is None:
            patch = _released.pop()
            if not patch._holders and patch._undo is not None:
                undo, patch._undo = patch._undo, None
                undo()

    def refuse(self) -> NoReturn:
        """Raise UnsupportedError with the missing names."""
        raise lacks(self.owner, self.missing, subject=f"{self.name} with a tensor-parallel model")

    def refusing(self, needs: Callable[..., bool]) -> Callable[..., Any]:
        """A replacement, for `without`, that raises for calls whose arguments need the patch."""

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
            self.missing = str(getattr(error, "problem", error)).partition(" (")[0]  # without a file's path
        if os.environ.get("RANK", "0") == "0":
            then = "do without the change" if self.without is nothing else "that need the change are refused"
            text = f"{release(self.owner)}: {self.missing}; tp_transformers leaves {self.name} unchanged"
            warn_once(logger, f"{text}, and tensor-parallel models {then}")
        with suppress(*_PROBLEMS):
            return (self.without or nothing)()
        return nothing()


ALL: list[Patch] = []
"""Every patch."""
_released: list[Patch] = []
"""Patches that lost a holder and may have to be undone."""


def nothing() -> Undo:
    """Apply no patch: models work without it."""
    return lambda: None


class MissingError(UnsupportedError):
    """A library lacks a function or method to replace."""

    def __init__(self, *names: tuple[Any, str]) -> None:
        """`names`: pairs of a class or module and the name that it lacks."""
        owner = names[0][0]
        library = getattr(owner, "__module__", owner.__name__).partition(".")[0]
        paths = (f"{getattr(owner, '__qualname__', owner.__name__)}.{name}" for owner, name in names)
        self.problem = f"no {', '.join(paths)}"
        super().__init__(str(lacks(library, self.problem, subject=f"a change of {library}")))


_PROBLEMS = (MissingError, AttributeError, ImportError)

Change = tuple[Any, str, Callable[..., Any]]
"""An owner, the name in it, and the replacement; see `replace`."""


def replace_all(changes: Iterable[Change]) -> Undo:
    """Replace several methods or functions, or none if one is missing; returns a function that undoes it."""
    changes = list(changes)
    missing = [(owner, name) for owner, name, _ in changes if inspect.getattr_static(owner, name, None) is None]
    if missing:
        raise MissingError(*missing)
    with ExitStack() as undos:
        for change in changes:
            undos.callback(replace(*change))
        return undos.pop_all().close


def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> Undo:
    """Replace a method of a class or a function of a module; returns a function that undoes it.

    `replacement` takes the original function, then its arguments. If another library has since wrapped the
    replacement, undoing leaves the wrapper in place, and the replacement just calls the original. Raises MissingError
    if `owner` lacks `name`.
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
    """Run `install` once the module `name` is imported, or now if it already is; returns a function that undoes it."""
    if name in sys.modules:
        return install()
    waiting = _Waiting(name, install)
    sys.meta_path.insert(0, waiting)
    return waiting.undo


class _Waiting(MetaPathFinder):
    """A finder in `sys.meta_path` that delegates to the finders after it, and runs a function after one import."""

    def __init__(self, name: str, install: Install) -> None:
        self._name, self._install = name, install
        self._undo: Undo | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # all others: two of these would call each other
        specs = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((spec for spec in specs if spec is not None), None)
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
