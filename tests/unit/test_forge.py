"""Files of the forge: workflows call targets of the Makefile, with releases that pyproject.toml claims."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import tp_transformers

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # as text: Python 3.10 has no tomllib
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WRITES = {"pages", "id-token", "attestations"}
"""Permissions beyond reading: to deploy the pages, to name the workflow to PyPI, to attest provenance."""

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


def runs(workflow: dict[str, Any]) -> Iterator[tuple[str, dict[str, set[str]]]]:
    """Every command, and the values of each of its variables: of the matrix, where they come from it."""
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        rows = matrix.get("include", [])
        for step in job["steps"]:
            values = {}
            for name, value in step.get("env", {}).items():
                axis = re.fullmatch(r"\$\{\{ matrix\.(\w+) \}\}", value)
                values[name] = {*matrix.get(axis[1], ()), *(row[axis[1]] for row in rows)} if axis else {value}
            if "run" in step:
                yield step["run"], values


def variables(command: str, values: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Variables that a command gives to make, each with every value that it has in the matrix."""
    for name, text in re.findall(r"(\w+)=(\"[^\"]*\"|\S*)", command):
        text = text.strip('"')
        for value in values.get(text.removeprefix("$"), {text}):
            yield name, value


def claimed(library: str) -> SpecifierSet:
    (found,) = re.findall(rf'^    "{library}([<>=][^"]*)",', PROJECT, re.MULTILINE)
    return SpecifierSet(found)


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"test", "nightly", "docs", "release"}


@each_workflow
def test_commands_are_targets(path) -> None:
    declared = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
    targets = set(declared[1].replace("\\\n", " ").split())
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)
    for command, values in runs(read(path)):
        first, target, *_ = command.split()
        if first == "make":
            name = target.strip('"')
            assert values.get(name.removeprefix("$"), {name}) <= targets, command
        else:
            assert first == "python", f"{command}: make it a target, so that it can be run by hand"
            assert (ROOT / target).is_file()


@each_workflow
def test_releases_are_those_that_the_project_claims(path) -> None:
    classified = set(re.findall(r"Python :: (3\.\d+)", PROJECT))
    workflow = read(path)
    for job in workflow["jobs"].values():
        assert set(job.get("strategy", {}).get("matrix", {}).get("python", ())) <= classified
        for step in job["steps"]:
            version = step.get("with", {}).get("python-version", "${{ matrix.python }}")
            assert version == "${{ matrix.python }}" or version in classified
    for command, values in runs(workflow):
        for name, value in variables(command, values):
            if name == "TORCH":
                assert value == "newest" or value in claimed("torch"), value
            elif name == "VERSIONS":
                numbers = set(value.split()) - {"newest", "pre", "main"}
                assert all(number in claimed("transformers") for number in numbers), value


@each_workflow
def test_permissions_are_few_and_actions_have_a_major_version(path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 300
        wider = {name for name, value in job.get("permissions", {}).items() if value != "read"}
        assert wider <= WRITES
        assert not wider or path.stem in ("docs", "release")
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])
                assert "checkout@" not in step["uses"] or step["with"]["persist-credentials"] is False


def test_the_oldest_claimed_releases_are_tested() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "test.yml")
    pythons = {
        python
        for job in workflow["jobs"].values()
        for python in job.get("strategy", {}).get("matrix", {}).get("python", ())
    }
    given = {pair for command, values in runs(workflow) for pair in variables(command, values)}
    for name, library in (("TORCH", "torch"), ("VERSIONS", "transformers")):
        (oldest,) = [each.version for each in claimed(library) if each.operator == ">="]
        assert any(key == name and re.match(rf"{re.escape(oldest)}\b", value) for key, value in given), library
    classified = re.findall(r"Python :: (3\.\d+)", PROJECT)
    assert {classified[0], classified[-1]} <= pythons


def test_forms_ask_for_the_report() -> None:
    forms = {path.stem: read(path) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    assert forms.keys() == {"bug", "feature", "architecture", "config"}
    for name in ("bug", "architecture"):
        asked = [field for field in forms[name]["body"] if "`tp-transformers env`" in field["attributes"]["label"]]
        assert [field["validations"]["required"] for field in asked] == [True]


def test_the_version_its_date_and_the_address_are_the_same_everywhere() -> None:
    citation = read(ROOT / "CITATION.cff")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d\S*)\] - (\S+)$", changelog, re.MULTILINE)
    assert newest.groups() == (citation["version"], citation["date-released"])
    assert tp_transformers.__version__.partition(".dev")[0] == citation["version"]
    assert f"[{citation['version']}]: {citation['repository-code']}/releases/tag/v{citation['version']}" in changelog
    address = re.search(r'^Homepage = "(https://github.com/(.+?)/(.+?))"$', PROJECT, re.MULTILINE)
    assert citation["repository-code"] == address[1]
    for path in (ROOT / "SECURITY.md", ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"):
        found = re.findall(r"https://github\.com/[\w.-]+/[\w.-]+", path.read_text(encoding="utf-8"))
        assert set(found) == {address[1]}
