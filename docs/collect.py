"""Collect the pages of the site in build/pages, with the configuration of their build in build/mkdocs.yml.

The pages of the project keep their paths, so that their links to each other hold; every plan, every example and every
public namespace gets a page. A link to a plan or an example leads to its page, a link to another file to the
repository; a link to nothing is an error.

    python -m docs.collect
"""

from __future__ import annotations

import ast
import html
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
FOLDERS = ("docs", "model_plans", "tp_transformers", "examples", "benchmarks", "tests")
EXAMPLES = "examples"
PROOFS, PROOFS_DATA = "model_plans/PROOFS.md", "tests/data/proofs.json"
"""The page of every model type, and the file of which the page is made."""
BOOSTS = {
    "api/": 0.1,
    "benchmarks/": 0.1,
    "examples/": 0.1,
    "model_plans/": 0.2,
    "tests/": 0.2,
    "CHANGELOG.md": 0.1,
    "tp_transformers/": 0.2,
}
"""Beginning of a path -> factor of a page in a search, unless it is one of the pages of a task."""
REFERENCE = ("Examples", "Python API", "Develop")
"""Entries of the navigation with pages that count less in a search; all others are tasks of a user."""


def main() -> None:
    nav = yaml.safe_load((ROOT / "docs" / "nav.yml").read_text(encoding="utf-8"))
    named = set(_named(nav))
    tasks = set(_named([entry for entry in nav if not entry.keys() & set(REFERENCE)]))
    pages = {path: (ROOT / path).read_text(encoding="utf-8") for path in _files("*.md")}
    plan_pages = plans()
    pages |= {**plan_pages, **examples(), **reference(), PROOFS: every_model_type()}
    folder = BUILD / "pages"
    written = set()
    for path, text in pages.items():
        boost = 1 if path in tasks else next((BOOSTS[start] for start in BOOSTS if path.startswith(start)), 0.5)
        _write(folder / path, _front_matter(boost) + for_site(text, path, set(pages)))
        written.add(folder / path)
    for path in (*_files("*.png"), *_files("*.svg"), *_files("assets/*")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)
        written.add(folder / path)
    for old in set(folder.rglob("*.*")) - written:
        old.unlink()
    others = [path for path in pages if path not in named and path not in plan_pages]
    foot = f'tp_transformers {_version()} \N{MIDDLE DOT} <a href="{_repository().partition("/blob")[0]}">repository</a>'
    expanded = yaml.safe_dump({"copyright": foot, "nav": _expanded(nav, others)}, sort_keys=False)
    _write(BUILD / "mkdocs.yml", (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8") + "\n" + expanded)


def plans() -> dict[str, str]:
    """Page of each plan: its title, model types, text, and the rows of the proofs that name it."""
    rows = [line for line in every_model_type().splitlines() if re.match(r"\| `[\w.-]+` \|", line)]
    head = "| `model_type` | plan | of 2, 3, 4 | output | gradient | replicated, and why not more |"
    pages = {}
    for path in sorted((ROOT / "model_plans").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        title = re.match(r"# (.+?): (https:\S+)", text)
        assert title, f"{path.name} does not begin with `# Title: https://...`"
        types = yaml.safe_load(text)["model_type"]
        names = ", ".join(f"`{name}`" for name in ([types] if isinstance(types, str) else types))
        proven = [row for row in rows if f"({path.name})" in row]
        pages[f"model_plans/{path.stem}.md"] = "\n".join(
            [
                f"# {title[1]}",
                "",
                f"Plan `{path.name}` for the model types {names}: [architecture]({title[2]}), "
                "[format](README.md#the-format).",
                "",
                f"```yaml\n{text}```",
                *(["", "## Proofs", "", head, "| --- | --- | --- | --- | --- | --- |", *proven] if proven else []),
                "",
            ]
        )
    return pages


@cache
def every_model_type() -> str:
    """Page of the proofs: a table for each kind of model."""
    from tests.support.readme import proofs

    return f"# Every model type\n\n{proofs()}\n"


def examples() -> dict[str, str]:
    """Page of each example: its docstring, and its text."""
    pages = {}
    for path in sorted((ROOT / EXAMPLES).iterdir()):
        text, languages = path.read_text(encoding="utf-8"), {".py": "python", ".sh": "sh", ".yaml": "yaml"}
        if path.suffix in languages and path.name != "__init__.py":
            doc = ast.get_docstring(ast.parse(text)) if path.suffix == ".py" else None
            about = "{}\n\n".format(doc.splitlines()[0].replace("[", r"\[")) if doc else ""
            code = f"```{languages[path.suffix]}\n{text}```"
            pages[f"{EXAMPLES}/{path.stem}.md"] = f"# {path.name}\n\n{about}{code}\n"
    return pages


def reference() -> dict[str, str]:
    """Reference of the names at the top level, and of each namespace."""
    package = ROOT / "tp_transformers"
    top, spaces = [], []
    for name in _all(package / "__init__.py"):
        (spaces if (package / name).is_dir() or (package / f"{name}.py").exists() else top).append(name)
    listed = "\n".join(f"- [`tp_transformers.{name}`]({name}.md)" for name in spaces)
    about = f"Names of `tp_transformers` itself. The others are in namespaces:\n\n{listed}\n\n"
    pages = {"api/README.md": f"# Python API\n\n{about}" + _entries("tp_transformers", top)}
    for name in spaces:
        file = package / name / "__init__.py" if (package / name).is_dir() else package / f"{name}.py"
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        title = f"# tp_transformers.{name}\n\n{doc.splitlines()[0].removesuffix(' See README.md.')}\n\n"
        pages[f"api/{name}.md"] = title + _entries(f"tp_transformers.{name}", _all(file))
    return pages


def _entries(package: str, names: list[str]) -> str:
    return "".join(f"::: {package}.{name}\n\n" for name in names)


def _all(file: Path) -> list[str]:
    """Public names of a module, as it lists them."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(statement.value)]
    raise AssertionError(f"{file} has no list of public names")


def for_site(text: str, path: str, pages: set[str]) -> str:
    """The page without markers, and with links that hold in the site."""
    parts = re.split(r"^(```.*\n(?:.*\n)*?```)$", text, flags=re.MULTILINE)
    for place in range(0, len(parts), 2):
        prose = re.sub(r"^<!-- /?[\w ]+ -->$", "", parts[place], flags=re.MULTILINE)
        prose = re.sub(r"\[?!\[[^]]*\]\(https://[^)]*\)(\]\([^)]*\))?", "", prose)  # badges are on other servers
        prose = re.sub(r"(?<=\.\d\d) (?=\.\d\d)", "\N{NO-BREAK SPACE}", prose)  # fractions of one cell
        prose = re.sub(r"`[^`\n]*\\\|[^`\n]*`", _code_with_pipe, prose)
        parts[place] = re.sub(r"\]\(([^()\s#]+)(#[^()\s]*)?\)", lambda link: _link(link, path, pages), prose)
    return "".join(parts)


def _link(link: re.Match[str], path: str, pages: set[str]) -> str:
    target, anchor = link[1], link[2] or ""
    if "//" in target:
        return link[0]
    folder = PurePosixPath(path).parent
    place = PurePosixPath(normpath(str(folder / target)))
    if place.suffix in (".png", ".svg"):  # a page may have its name
        return link[0]
    if str(place) == PROOFS_DATA:
        place = PurePosixPath(PROOFS)
    for page in (str(place), f"{place}/README.md", str(place.with_suffix(".md"))):
        if page in pages:
            return f"]({relpath(page, folder)}{anchor})"
    found = ROOT / place
    assert found.exists(), f"{path}: {target}"
    return f"]({_repository()}/{place})"


def _code_with_pipe(code: re.Match[str]) -> str:
    """Code in a cell of a table: Markdown of the site would show the backslash before a pipe."""
    return f"<code>{html.escape(code[0][1:-1].replace(chr(92) + '|', '|')).replace('|', '&#124;')}</code>"


def _repository() -> str:
    """Address of the project's files in its repository."""
    home = re.search(r'^Homepage = "(\S+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert home, "pyproject.toml has no Homepage"
    return f"{home[1]}/blob/main"


def _version() -> str:
    text = (ROOT / "tp_transformers" / "__init__.py").read_text(encoding="utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]


def _files(pattern: str) -> Iterator[str]:
    yield from sorted(path.name for path in ROOT.glob(pattern))
    for folder in FOLDERS:
        yield from sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(pattern))


def _front_matter(boost: float) -> str:
    return "" if boost == 1 else f"---\nsearch:\n  boost: {boost}\n---\n"


def _write(path: Path, text: str) -> None:
    """Write a file if it differs, so that a server of the site builds only then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _named(nav: Any) -> Iterator[str]:
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from [entry] if isinstance(entry, str) else _named(entry)


def _expanded(nav: list[Any], others: list[str]) -> list[Any]:
    """The navigation, with the pages of the folder in place of each entry `folder/*`."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            found.append(
                {title: below if isinstance(below, str) else _expanded(below, others) for title, below in entry.items()}
            )
        elif entry.endswith("/*"):
            found += [page for page in others if page.startswith(entry.removesuffix("*"))]
        else:
            found.append(entry)
    return found


if __name__ == "__main__":
    main()
