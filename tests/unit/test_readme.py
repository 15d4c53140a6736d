"""The pages are true: generated parts are up to date, links lead somewhere, every strategy and result is named."""

from __future__ import annotations

import re

import pytest

from tests.support.readme import (
    GENERATED,
    PACKAGE,
    PAGES,
    README,
    ROOT,
    STRATEGIES_PAGE,
    anchors,
    called,
    generated,
    links,
    prose,
)
from tp_transformers import TensorParallelError, errors
from tp_transformers.strategies import STRATEGIES

ONE_SCREEN = 40
"""Lines from which on a page begins with a drawing or a table."""
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})
"""Every folder of the package."""

each_page = pytest.mark.parametrize("page", PAGES, ids=called)


@each_page
def test_generated_parts_are_up_to_date(page) -> None:
    assert generated(page) == page.read_text(encoding="utf-8"), "run `python -m tests.support.readme`"


def test_every_generated_part_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"<!-- {name} -->" in text for name in GENERATED)


@pytest.mark.parametrize("folder", FOLDERS, ids=called)
def test_every_folder_has_a_page_with_all_of_its_modules(folder) -> None:
    page = folder / "README.md"
    assert page.exists(), "begin it with a title and a sentence about the folder, and let it have a block `modules`"
    text = page.read_text(encoding="utf-8")
    _, begin, rest = text.partition("<!-- map -->" if folder == PACKAGE else "<!-- modules -->")
    assert begin
    listed = set(re.findall(r"\[[^]]+\]\(([^)]+)\)", rest.partition("<!-- /")[0]))
    modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert modules | {f"{path.parent.name}/README.md" for path in folder.glob("*/*.py")} == listed - {"__init__.py"}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=called)
def test_links_lead_somewhere(page) -> None:
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert target.suffix == ".md", link
            assert anchor in anchors(target), f"{link}: there are {anchors(target)}"


@each_page
def test_long_pages_begin_with_a_drawing_or_a_table(page) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    if page.parent != ROOT and len(lines) > ONE_SCREEN:
        first = next(line for line in lines[1:] if line and not line.startswith("<!--"))
        assert first.startswith(("```", "|", "![")), first


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


@each_page
def test_lines_are_of_one_width(page) -> None:
    # Docstrings, and errors of transformers.
    text = re.sub(r"<!-- (public names) -->.*<!-- /\1 -->", "", prose(page), flags=re.DOTALL)
    for line in text.splitlines():
        assert len(line) <= 120 or line.startswith(("|", "[")), line


def test_every_page_is_found_from_another() -> None:
    found = {README}
    for page in PAGES:
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page) if "//" not in link}
        found |= targets - {page}
    assert not set(PAGES) - found


def test_tests_that_pages_name_are_there() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    functions = re.findall(r"^def (test_\w+)", "".join(files.values()), re.MULTILINE)
    for page in PAGES:
        for name, end in re.findall(r"`(?:\w+/)*(test_\w+)(\.py|\.\.\.)?`", prose(page)):
            if end == ".py":
                assert f"{name}.py" in files, f"{called(page)}: {name}"
            else:
                assert any(each.startswith(name) for each in functions), f"{called(page)}: {name}"


def test_every_strategy_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", STRATEGIES_PAGE.read_text(encoding="utf-8")))
    assert set(STRATEGIES) <= named


def test_every_error_is_named() -> None:
    kinds = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, TensorParallelError)
    ]
    page = (PACKAGE / "ERRORS.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in kinds)


def test_every_result_is_named() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    folder = ROOT / "benchmarks" / "results"
    results = [path.name for path in folder.iterdir() if path.suffix == ".md"]
    assert results
    assert all(f"results/{name}" in page for name in results)
