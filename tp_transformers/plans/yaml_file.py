"""Plan files: those of this package, and a reader of YAML with bounds on size, depth and aliases (untrusted input)."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ..errors import PlanError, shorten, shown

MAX_BYTES = 1 << 20
"""Maximum size of a file; the plans that ship with the package have 5 kB at most."""
MAX_NODES = 100_000
"""Maximum number of values, names and collections in a file; an alias counts as the nodes that it expands to."""
MAX_DEPTH = 16
"""Maximum nesting of collections; a plan needs 5. libyaml crashes the process at about 20,000."""
MAX_SCALAR = 1000
"""Maximum characters of a name or value. PyYAML takes quadratic time for base-60 numbers such as 1:2:3."""


def read_plan_file(path: Path) -> Any:
    """Read the data of a plan's YAML file. Raises PlanError if it cannot be read, or is not YAML within the bounds."""
    try:
        text = _read(path)
        _check_bounds(text)
        return yaml.load(text, Loader=_PlanLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        reason = shorten(" ".join(str(problem or error).split()), 200)
        fix = "Correct it there; model_plans/README.md describes the format." if where else "Write it anew, as UTF-8."
        raise PlanError(f"plan {shorten(str(path), 200)} is not YAML for a plan: {where}{reason}. {fix}") from None


def model_types_of(path: Path) -> tuple[str, ...]:
    """Read the model types of a plan of this package. Parses only its first entry: parsing all files takes 30 ms."""
    names, is_list = [], False
    for event in yaml.parse(path.read_text(encoding="utf-8"), Loader=_SafeLoader):
        is_list = is_list or isinstance(event, yaml.SequenceStartEvent)
        if isinstance(event, yaml.ScalarEvent):
            names.append(event.value)
        if isinstance(event, yaml.SequenceEndEvent) or (len(names) == 2 and not is_list):
            break
    return tuple(names[1:])


def _read(path: Path) -> str:
    """Read the text of a regular file of at most MAX_BYTES. Raises PlanError for other files; pipes are not opened."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise _unreadable(path, "a pipe, socket or device")
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise _unreadable(path, (getattr(error, "strerror", None) or str(error)).lower()) from None
    if len(content) > MAX_BYTES:
        raise _unreadable(path, f"more than {MAX_BYTES} bytes")
    return content.decode()


def _unreadable(path: Path, got: str) -> PlanError:
    subject, fix = f"plan {shorten(str(path), 200)}", 'Correct the path, or pass tp_plan="auto".'
    return PlanError(subject, got=got, expected="a YAML file", fix=fix)


def _check_bounds(text: str) -> None:
    """Raise YAMLError at the first value that exceeds a bound. Constructs no objects; takes linear time."""
    nodes = 0
    sizes: dict[str, int] = {}  # anchor -> its number of nodes; "" is no anchor
    opened: list[tuple[str, int]] = []  # (anchor, number of nodes before it)
    for event in yaml.parse(text, Loader=_SafeLoader):
        anchor: str = getattr(event, "anchor", None) or ""
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, nodes_before = opened.pop()
            sizes[anchor] = nodes - nodes_before
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == name for name, _ in opened):
                raise _beyond(event, f"*{shorten(anchor, 50)} is inside the value that it names")
            nodes += sizes.get(anchor, 0)  # an alias without an anchor is rejected by the loader
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((anchor, nodes))
            nodes += 1
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            sizes[anchor] = 1
            if len(event.value) > MAX_SCALAR:
                raise _beyond(event, f"a text of {len(event.value)} characters, which are more than {MAX_SCALAR}")
        if len(opened) > MAX_DEPTH:
            raise _beyond(event, f"more than {MAX_DEPTH} levels inside each other")
        if nodes > MAX_NODES:
            raise _beyond(event, f"more than {MAX_NODES} values, those of aliases counted")


def _beyond(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where PyYAML was built with it


class _PlanLoader(_SafeLoader):
    """Loader that rejects duplicate keys; YAML would silently keep the last.

    Raises YAMLError for every value that cannot be constructed.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:  # PyYAML's constructors raise any error for text that does not fit its tag, as in `!!int x`
            kind, value = node.tag.rpartition(":")[2], node.value
            content = shown(value) if isinstance(value, str) else "a collection"
            raise yaml.constructor.ConstructorError(
                None, None, f"{content} cannot be read as {shorten(kind, 50)}", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            keys = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    name = self.construct_object(key, deep=True)
                    if name in keys:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"{shown(name)} is there twice", key.start_mark
                        )
                    keys.add(name)
        return dict(super().construct_mapping(node, deep))


@cache
def available_plans() -> Mapping[str, Path]:
    """The plans that ship with the package: {model_type: YAML file}."""
    package = Path(__file__).parents[1]
    wheel, checkout = package / "model_plans", package.parent / "model_plans"
    plans: dict[str, Path] = {}
    for path in sorted((wheel if wheel.is_dir() else checkout).glob("*.yaml")):
        plans.update(dict.fromkeys(model_types_of(path), path))
    return MappingProxyType(plans)


def plan_names() -> Mapping[str, Path]:
    """Plans by model type, as in `available_plans`, and by file name."""
    return {**{path.stem: path for path in available_plans().values()}, **available_plans()}
