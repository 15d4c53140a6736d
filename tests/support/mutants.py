"""Mutants: one operator, constant, condition or return of the core changes at a time, and tests have to fail.

    python -m tests.support.mutants                             the packages of READ, with their samples
    python -m tests.support.mutants slices --sample 40          40 mutants of a package, the same ones in each run
    python -m tests.support.mutants ranks --only ranks.group    mutants whose "module function: change" has the text

The tests of the package are collected once. A first child runs them all and notes the functions that each reaches,
here and on the ranks of the pool. Then each mutant has a child, with the code of one function exchanged: it runs the
tests that reach the function, the fastest first, until one fails. All quick tests try what then lives. Not changed are
texts, annotations, and what runs at the import of a module. Survivors that tests/data/mutants.json does not explain are
printed, and the command fails.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import copy
import functools
import hashlib
import importlib
import json
import marshal
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

from tests.support.pool import PACKAGE, Pool

FILE = Path(__file__).parents[1] / "data" / "mutants.json"
TESTS: dict[str, tuple[int, str]] = {
    "slices": (150, "unit/slices unit/checkpoint"),
    "plans": (120, "unit/plans unit/test_wrong_use.py"),
    "strategies": (60, "unit/strategies distributed/strategies distributed/test_llama.py"),
    "checkpoint": (60, "unit/checkpoint distributed/checkpoint distributed/loading/test_conversion.py"),
    "ranks": (
        60,
        "unit/ranks distributed/ranks distributed/test_llama.py distributed/strategies/test_collectives_count.py "
        "distributed/strategies/test_second_order.py distributed/strategies/test_shared_heads.py",
    ),
}
"""Package -> (mutants of a run, its tests)."""
READ = ("slices", "plans", "strategies", "checkpoint", "ranks")  # packages whose survivors have been read
WIDE = "unit distributed features"
"""Tests for what the tests of a package let live."""
SECONDS = float(os.environ.get("SECONDS", 300))  # of all tests of a mutant, without it; slower ones are left out
SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or,
    ast.Or: ast.And, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.USub: ast.UAdd,
}  # fmt: skip

WRAPPERS = (property, classmethod, staticmethod, functools.cached_property, functools._lru_cache_wrapper)
Code = tuple[str, str, int, bytes]
"""(module, qualified name and first line of a function, its marshalled code)."""


class Mutant(NamedTuple):
    """One change of one function."""

    module: str
    function: str
    first: int
    line: int
    change: str
    code: Callable[[], bytes]

    @property
    def key(self) -> str:
        return f"{self.module} {self.function}: {self.change}"


def changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """(attribute, other value) of each change of a node."""
    if type(operator := getattr(node, "op", None)) in SWAPPED:
        yield "op", SWAPPED[type(operator)]()
    if isinstance(node, ast.Compare):
        for place, own in enumerate(node.ops):
            if type(own) in SWAPPED:
                yield "ops", [*node.ops[:place], SWAPPED[type(own)](), *node.ops[place + 1 :]]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        yield "value", (not node.value) if isinstance(node.value, bool) else node.value + 1
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "test", ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.comprehension):
        for place in range(len(node.ifs)):
            yield "ifs", node.ifs[:place] + node.ifs[place + 1 :]
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "value", ast.BoolOp(ast.And(), [ast.Constant(None), node.value])  # names of a closure stay


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """What may change below a node."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(value, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from _inside(child)


def _functions(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """(qualified name, tree) of functions and methods."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")


def _first(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(node.lineno for node in function.decorator_list)])


def _code(tree: ast.Module, path: str, first: int, name: str) -> bytes:
    """Code of a function of a changed module."""
    parts = [compile(ast.fix_missing_locations(tree), path, "exec")]
    for part in parts:
        if part.co_qualname == name and part.co_firstlineno == first:
            return marshal.dumps(part)
        parts += [inner for inner in part.co_consts if isinstance(inner, CodeType)]
    raise LookupError(name)


def mutants(module: ModuleType) -> Iterator[Mutant]:
    """Every mutant of a module."""
    path = str(module.__file__)
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    known, name = Counter[tuple[str, str]](), module.__name__.removeprefix(f"{PACKAGE.name}.")

    def code(node: ast.AST, attribute: str, value: Any, first: int, function: str) -> bytes:
        kept = getattr(node, attribute)
        setattr(node, attribute, value)
        try:
            return _code(tree, path, first, function)
        finally:
            setattr(node, attribute, kept)

    for function, top in _functions(tree.body):
        for node in (child for statement in top.body for child in (statement, *_inside(statement))):
            for attribute, value in changes(node):
                changed = copy.copy(node)
                setattr(changed, attribute, value)
                before, after = (ast.unparse(part).splitlines()[0] for part in (node, changed))
                change = f"{before} -> {after}"
                known[function, change] += 1
                if known[function, change] > 1:
                    change += f" #{known[function, change]}"
                first, line = _first(top), getattr(node, "lineno", top.lineno)
                make = functools.partial(code, node, attribute, value, first, function)
                yield Mutant(name, function, first, line, change, make)


def _reach(value: Any, module: str, seen: set[int]) -> Iterator[FunctionType]:
    """Functions in a value of a module, also those that decorators hold."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, FunctionType):
        yield value
        inner = [value.__dict__.get("__wrapped__")]
        for cell in value.__closure__ or ():
            inner += [cell.cell_contents] if cell != CellType() else []
    elif isinstance(value, type) and value.__module__ == module:
        inner = list(vars(value).values())
    elif isinstance(value, WRAPPERS):
        inner = [getattr(value, name, None) for name in ("fget", "fset", "func", "__func__", "__wrapped__")]
    for part in inner:
        yield from _reach(part, module, seen)


def live(module: ModuleType) -> dict[tuple[str, int], list[FunctionType]]:
    """Functions of a module as the process knows them, by name and first line."""
    found, seen = defaultdict(list), set[int]()
    for value in list(vars(module).values()):
        for function in _reach(value, module.__name__, seen):
            if function.__code__.co_filename == module.__file__:
                found[function.__code__.co_qualname, function.__code__.co_firstlineno].append(function)
    return dict(found)


def _import(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE.name}.{name}")


def exchange(codes: Sequence[Code]) -> None:
    """Put codes into functions of this process; nothing stays of what they had computed."""
    places = {name: live(_import(name)) for name in {code[0] for code in codes}}
    for name, function, first, code in codes:
        for own in places[name][function, first]:
            own.__code__ = marshal.loads(code)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in (PACKAGE.name, "tests"):
            values = list(vars(module).values())
            values += [part for value in values if isinstance(value, type) for part in vars(value).values()]
            for value in values:
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


REACHED: set[str] = set()
"""Keys of the functions that ran, where codes note them."""


def noting(module: ModuleType) -> Iterator[Code]:
    """The functions of a module, each of which notes that it runs."""
    path, name = str(module.__file__), module.__name__.removeprefix(f"{PACKAGE.name}.")
    tree, places = ast.parse(Path(path).read_text(encoding="utf-8")), live(module)
    found = [(function, top) for function, top in _functions(tree.body) if (function, _first(top)) in places]
    for function, top in found:
        top.body.insert(0, ast.parse(f"__reached__({f'{name} {function} {_first(top)}'!r})").body[0])
    for function, top in found:
        yield name, function, _first(top), _code(tree, path, _first(top), function)


class Carried(NamedTuple):
    """A function for ranks of the pool, which exchange codes before they call it."""

    folder: str
    child: int
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        if not hasattr(builtins, "__reached__"):
            _limit_memory()
            threading.Thread(target=self._end_with_child, daemon=True).start()
            builtins.__reached__ = REACHED.add  # type: ignore[attr-defined]
            exchange(pickle.loads(Path(self.folder, "codes").read_bytes()))
        try:
            return self.function(*args)
        finally:
            if REACHED:
                with open(f"{self.folder}/reached", "a") as file:
                    file.write("".join(f"{key}\n" for key in REACHED))
                REACHED.clear()

    def _end_with_child(self) -> None:
        while Path(f"/proc/{self.child}").exists():
            time.sleep(1)
        os._exit(1)


def _limit_memory() -> None:
    """Let a mutant take 6 GiB beside what its process had."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 6 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


class Runs:
    """A plugin of pytest that runs the collected tests in children, and writes what becomes of mutants."""

    def __init__(self, chosen: list[Mutant], folder: str) -> None:
        self.chosen, self.folder = chosen, folder
        self.outcomes: list[tuple[Mutant, str]] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        Pool().run(1, os.getpid)  # starts the process that workers are forked from
        modules = [_import(name) for name in sorted({mutant.module for mutant in self.chosen})]
        self._fork(lambda: self._note(session.items), [code for module in modules for code in noting(module)])
        seconds: dict[str, float] = {}
        reaching: dict[str, list[pytest.Item]] = defaultdict(list)
        items = {item.nodeid: item for item in session.items}
        for line in Path(self.folder, "tests").read_text().splitlines():
            test, passed, seconds[test], keys = json.loads(line)
            for key in keys if passed else ():
                reaching[key].append(items[test])
        print(f"{len(seconds)} tests take {sum(seconds.values()):.0f} s", flush=True)
        for mutant in self.chosen:
            key, spent, began = f"{mutant.module} {mutant.function} {mutant.first}", 0.0, time.monotonic()
            tests = sorted(reaching[key], key=lambda item: seconds[item.nodeid])
            tests = [item for item in tests if (spent := spent + seconds[item.nodeid]) < SECONDS or item is tests[0]]
            outcome = "not reached"
            if tests:
                code = (mutant.module, mutant.function, mutant.first, mutant.code())
                outcome = self._fork(functools.partial(self._try, tests, seconds), [code])
            self.outcomes.append((mutant, outcome))
            took = f"{time.monotonic() - began:.0f} s, {len(tests)} tests"
            print(f"{outcome}: {mutant.key}  (line {mutant.line}; {took})", flush=True)
        return True

    def _fork(self, body: Callable[[], bool], codes: list[Code]) -> str:
        """What becomes of a child with these codes: its tests pass ("LIVES"), fail, or end it."""
        Path(self.folder, "codes").write_bytes(pickle.dumps(codes))
        Path(self.folder, "last").write_text("")
        child = os.fork()
        if not child:
            try:
                os.setpgid(0, 0)
                os.environ["TMPDIR"] = tempfile.tempdir = self.folder
                sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - of a process that ends
                os.dup2(sys.stdout.fileno(), 1)
                os.dup2(sys.stdout.fileno(), 2)
                forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign] # it does
                run, carried = Pool.run, functools.partial(Carried, self.folder, os.getpid())
                Pool.run = lambda own, size, *call, **limit: run(own, size, carried(call[0]), *call[1:], **limit)  # type: ignore
                _limit_memory()
                builtins.__reached__ = REACHED.add  # type: ignore[attr-defined]
                exchange(codes)
                os._exit(0 if body() else 1)
            finally:
                os._exit(2)
        status = os.waitpid(child, 0)[1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what its tests had started
        how = f"signal {status & 127}" if status & 127 else f"exit {status >> 8}"
        return f"killed ({how}) by {Path(self.folder, 'last').read_text()}" if status else "LIVES"

    def _note(self, items: list[pytest.Item]) -> bool:
        with open(f"{self.folder}/tests", "w") as file:
            for item, following in zip(items, [*items[1:], None], strict=True):
                began, _ = time.monotonic(), signal.alarm(300)
                reports = runtestprotocol(item, log=False, nextitem=following)
                took = time.monotonic() - began
                ranks = Path(self.folder, "reached")
                keys = REACHED | set(ranks.read_text().split("\n") if ranks.exists() else ())
                passed = all(report.passed for report in reports)
                file.write(json.dumps([item.nodeid, passed, took, sorted(keys)]) + "\n")
                file.flush()
                ranks.unlink(missing_ok=True)
                REACHED.clear()
        return True

    def _try(self, items: list[pytest.Item], seconds: dict[str, float]) -> bool:
        for item, following in zip(items, [*items[1:], None], strict=True):
            Path(self.folder, "last").write_text(item.nodeid)
            signal.alarm(int(20 + 10 * seconds[item.nodeid]))
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                return False
        return True


def survivors(chosen: list[Mutant], tests: str) -> list[Mutant]:
    """Mutants that none of the tests kills."""
    folder = tempfile.mkdtemp(prefix="mutants-")
    runs = Runs(sorted(chosen, key=lambda mutant: (mutant.module, mutant.line)), folder)
    options = ["-q", "-s", "-p", "no:cacheprovider", f"--basetemp={folder}/base", "-m", "not slow"]
    pytest.main([*options, *(f"tests/{path}" for path in tests.split())], plugins=[runs])
    shutil.rmtree(folder, ignore_errors=True)
    if len(runs.outcomes) < len(chosen):
        raise SystemExit("the tests were not collected")
    return [mutant for mutant, outcome in runs.outcomes if not outcome.startswith("killed")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("packages", nargs="*", default=list(READ))
    parser.add_argument("--sample", type=int)
    parser.add_argument("--only", nargs="*", help='mutants whose "module function: change" has one of the texts')
    parser.add_argument("--tests", help="tests in place of those of the packages, below tests/")
    parser.add_argument("--then", default=WIDE, help="tests for what those let live; an empty text: none")
    given = parser.parse_args()
    explained = {entry["mutant"] for entry in json.loads(FILE.read_text(encoding="utf-8"))}
    unknown: list[Mutant] = []
    for package in given.packages:
        usual, tests = TESTS[package]
        every: list[Mutant] = []
        for path in sorted((PACKAGE / package).rglob("*.py")):
            module = _import(".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"))
            places = live(module)
            every += [mutant for mutant in mutants(module) if (mutant.function, mutant.first) in places]
        chosen = [mutant for mutant in every if any(text in mutant.key for text in given.only or [""])]
        if not given.only:
            chosen.sort(key=lambda mutant: hashlib.sha256(mutant.key.encode()).hexdigest())
            chosen = chosen[: given.sample or usual]
        alive = survivors(chosen, given.tests or tests)
        new = [mutant for mutant in alive if mutant.key not in explained]
        killed, known = len(chosen) - len(alive), len(alive) - len(new)
        print(f"{package}: {killed} of {len(chosen)} killed, of {len(every)}; {known} are known", flush=True)
        unknown += new
    if unknown and given.then:
        unknown = survivors(unknown, given.then)
    for mutant in unknown:
        print(f"NEW, line {mutant.line}: {mutant.key}", flush=True)
    sys.exit(bool(unknown))


if __name__ == "__main__":
    main()
