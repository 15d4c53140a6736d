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
    modules = {name: f".{module}" for module, names in homes.items() for name in names.split()}
    root, _, inside = package.partition(".")

    def find(name: str) -> object:
        if name in modules:
            module = import_module(modules[name], package)
        elif name in public_names(inside):
            module = import_module(f".{public_names(inside)[name]}", root)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *public_names(inside)})

    return find, names
