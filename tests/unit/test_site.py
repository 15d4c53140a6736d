"""The site: each page is in the navigation once, and each link within it leads to a page or a picture of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import collect
from tests.support.readme import PAGES, ROOT, called, links


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that docs/collect.py has written to."""
    patch = pytest.MonkeyPatch()
    patch.setattr(collect, "BUILD", tmp_path_factory.mktemp("build"))
    collect.main()
    yield collect.BUILD
    patch.undo()


def paths(nav: Any) -> Iterator[str]:
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from [entry] if isinstance(entry, str) else paths(entry)


def test_each_page_is_in_the_navigation_once(build) -> None:
    nav = (build / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {path.relative_to(build / "pages").as_posix() for path in build.rglob("*.md")}
    plans = {f"model_plans/{path.stem}.md" for path in (ROOT / "model_plans").glob("*.yaml")}
    assert Counter(paths(yaml.safe_load(nav))) == Counter(pages - plans)
    assert plans <= {f"model_plans/{link}" for link in links(build / "pages" / "model_plans" / "README.md")}
    assert {called(page) for page in PAGES} <= pages
    for kind, suffix in (("model_plans", ".yaml"), *(("examples", suffix) for suffix in (".py", ".sh", ".yaml"))):
        assert {f"{kind}/{path.stem}.md" for path in (ROOT / kind).glob(f"[a-z]*{suffix}")} <= pages


def test_links_lead_to_pages_and_pictures(build) -> None:
    found = 0
    for page in build.rglob("*.md"):
        for link in links(page):
            if "//" not in link:
                path = link.partition("#")[0]
                assert not path or (page.parent / path).is_file(), f"{page}: {link}"
                found += 1
    assert found > 1000


def test_links_to_pictures_stay(build) -> None:
    def pictures(page: Path) -> list[str]:
        return [link for link in links(page) if link.endswith((".png", ".svg"))]

    expected = pictures(ROOT / "README.md")
    assert expected
    assert pictures(build / "pages" / "README.md") == expected
    assert all((build / "pages" / path).is_file() for path in expected)


def test_every_model_type_is_in_a_table(build) -> None:
    text = (build / "pages" / collect.PROOFS).read_text(encoding="utf-8")
    types = json.loads((ROOT / collect.PROOFS_DATA).read_text(encoding="utf-8"))
    assert all(f"`{name}`" in text for name in types)
    assert "](PROOFS.md)" in (build / "pages" / "model_plans" / "README.md").read_text(encoding="utf-8")


def test_pipes_in_code_of_tables_have_no_backslash(build) -> None:
    text = (build / "pages" / "tp_transformers" / "strategies" / "README.md").read_text(encoding="utf-8")
    assert "<code>x → [xA &#124; xB]</code>" in text
    assert not re.search(r"`[^`\n]*\\\|", text)
