"""Lazy imports: the names of a package are imported on first use, so that the package does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from .seams import public_names


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for `package`, whose names are those of `homes` and of features.

    For type checkers, the package also imports the names under `if TYPE_CHECKING:`.

    Args:
        homes: module, relative to the package -> its names, separated by spaces.
    """
    root, _, inside = package.partition(".")
    modules = {name: f"{inside}.{module}".lstrip(".") for module, names in homes.items() for name in names.split()}

    def find(name: str) -> object:
        known = modules if name in modules else public_names(inside)
        if name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(f".{known[name]}", root), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *public_names(inside)})

    return find, names
