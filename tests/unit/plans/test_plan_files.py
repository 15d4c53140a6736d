"""Plan files and dicts that are no plans: each is one short PlanError that names the file and the place, at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import main
from tests.support.models import llama_config
from tests.support.needs import needs
from tp_transformers import PlanError
from tp_transformers.loading.choose_plan import read_plan
from tp_transformers.plans import Plan
from tp_transformers.plans.yaml_file import MAX_BYTES, available_plans

LONGEST = 700
"""Characters of a message about one fault, with a path of 100."""


def bomb(first: str, entry: str, depth: int = 9) -> str:
    """Nine aliases of nine aliases of ...: 9**depth values."""
    lines = [f"a0: &a0 {first}"]
    for level in range(1, depth):
        aliases = ", ".join(entry.format(f"*a{level - 1}", place) for place in range(9))
        lines.append(f"a{level}: &a{level} " + (f"{{{aliases}}}" if ":" in entry else f"[{aliases}]"))
    return "\n".join(lines)


TEXTS = {
    "bomb of lists": (bomb("[x]", "{0}"), "more than 100000 values"),
    "bomb of maps": (bomb("{x: y}", "k{1}: {0}"), "more than 100000 values"),
    "bomb of merges": (bomb("{x: y}", "<<: {0}"), "more than 100000 values"),
    "many aliases": ("a: &a [" + "x, " * 999 + "]\nb: [" + "*a, " * 101 + "]", "more than 100000 values"),
    "alias to itself": ("rules: {a: {strategy: colwise, parts: &p [*p]}}", "line 1, column 43: *p is inside"),
    "rules in rules": ("rules: &r {a: *r}", "*r is inside"),
    "no anchor": ("rules: *x", "undefined alias"),
    "deep": ("rules: " + "[" * 900, "more than 16 levels"),
    "bottomless": ("rules: " + "[" * 200_000, "line 1, column "),  # libyaml has a limit of its own, by release
    "deep blocks": ("- " * 200_000, "more than 16 levels"),
    "long name": ("x" * 2000 + ": y", "a text of 2000 characters"),
    "long number": ("rules: {a: {strategy: x, unit: " + "9" * 5000 + "}}", "a text of 5000 characters"),
    "large number": ("rules: {a: {strategy: x, unit: " + "9" * 900 + "}}", "a: unit is a number of "),
    "number of base 60": ("rules: {a: " + "1:" * 400_000 + "1}", "a text of 800001 characters"),
    "large": ("#" * (1 << 20) + "\n", "more than 1048576 bytes"),
    "empty": ("", "got nothing"),
    "comment": ("# a plan\n", "got nothing"),
    "scalar": ("colwise", "got a str"),
    "two documents": ("rules: {}\n---\nrules: {}", "line 2, column 1: but found another document"),
    "tab": ("rules:\n\ta: colwise", "line 2, column 1: found character"),
    "object": ("rules: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "date": ("rules: {a: 2020-99-01}", "line 1, column 12: '2020-99-01' cannot be read as timestamp"),
    "int": ("rules: {a: !!int x}", "'x' cannot be read as int"),
    "no int": ("rules: {a: !!int ''}", "'' cannot be read as int"),
    "bool": ("rules: {a: !!bool x}", "'x' cannot be read as bool"),
    "timestamp": ("rules: {a: !!timestamp x}", "cannot be read as timestamp"),
    "text as map": ("rules: !!map x", "expected a mapping node"),
    "key that is a list": ("rules: {[a]: colwise}", "unhashable"),
    "key that is a number": ("rules: {0: colwise}", "the name 0 is no text; put it in quotes"),
    "key that is a float": ("rules: {1.10: colwise}", "the name 1.1 is no text"),
    "key that is null": ("rules: {null: colwise}", "the name None is no text"),
    "key that is true": ("rules: {on: colwise}", "the name True is no text"),
    "key with a control character": ('rules: {"a\\nb": colwise}', "the name 'a\\nb' is no name"),
    "section twice": ("rules: {}\nrules: {}", "line 2, column 1: 'rules' is there twice"),
    "sections": ("\n".join(f"a{number}: 0" for number in range(9000)), "unknown section 'a0' and 8999 more"),
    "section that is null": ("null: {}", "unknown section None"),
    "section that is false": ("rules: false", "section rules is a bool"),
    "section that is a set": ("rules: !!set {a, b}", "section rules is a set"),
    "rule that is NaN": ("rules: {a: .nan}", "a: the strategy is nan"),
    "widths": ("rules: {a: {strategy: colwise, widths: 3}}", "a: widths is 3"),
    "widths of lists": ("rules: {a: {strategy: colwise, widths: [[x]]}}", "a: widths is [['x']]"),
    "parts of lists": ("rules: {a: {strategy: colwise, parts: [[1]]}}", "a: parts is ([1],)"),
    "parts that are true": ("rules: {a: {strategy: colwise, parts: true}}", "a: parts is True"),
    "unit that is true": ("rules: {a: {strategy: colwise, unit: true}}", "a: unit is True"),
    "option that is a number": ("rules: {a: {strategy: colwise, 3: x}}", "a: a rule has `strategy`"),
    "attention of numbers": ("attention: {a: {query: 3}}", "attention a: {'query': 3} does not map"),
    "attention of lists": ("attention: {a: {query: [[x]]}}", "attention a: {'query': [['x']]} does not map"),
    "attention of maps": ("attention: {a: {query: {x: y}}}", "attention a:"),
    "attention that may be": ("attention: {a: {query: x, optional: 3}}", "attention a: optional is 3"),
    "model types": ("model_type: [[x]]", "model_type is [['x']]"),
    "model type of numbers": ("model_type: [1]", "model_type is [1]"),
    "extends a list": ("extends: [llama]", "extends is ['llama']"),
    "extends 0": ("extends: 0", "extends is 0"),
    "extends a long name": ("extends: " + "x" * 400, "which is no plan"),
    "extends a null character": ('extends: "a\\0b"', "extends is 'a\\x00b'"),
    "extends nothing there": ("extends: ../gone.yaml", "which is no plan"),
    "extends itself": ("extends: mine", "extends itself: mine.yaml -> mine.yaml"),
    "extends one that extends it": ("extends: back", "extends itself: mine.yaml -> back.yaml -> mine.yaml"),
    "extends a misspelt plan": ("extends: lama", "'lama', which is no plan (nearest: llama"),
    "section misspelt": ("rulez: {a: colwise}", "unknown section 'rulez' (nearest: rules)"),
    "roles misspelt": ("attention: {a: {keys: k_proj}}", "attention a"),
    "extends a file of something else": ("extends: other.yaml", "other.yaml: got a list"),
    "faults": ("rules: {" + ", ".join(f"a{number}: 3" for number in range(999)) + "}", "... and 994 more"),
}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "other.yaml").write_text("- a")
    (tmp_path / "back.yaml").write_text("extends: mine")
    return tmp_path / "mine.yaml"


def refused(path: Path) -> str:
    """The error of a plan file, in at most LONGEST characters."""
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(path)
    text = str(caught.value)
    assert str(path.parent) in text
    assert len(text) - len(str(path)) < LONGEST
    return text


@pytest.mark.parametrize(("text", "says"), TEXTS.values(), ids=TEXTS)
def test_texts_that_are_no_plans(mine, text, says) -> None:
    mine.write_text(text)
    assert says in refused(mine)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"rules: {a: \xff}", "can't decode byte 0xff"),
        ("rules: {a: b}".encode("utf-16"), "can't decode byte 0xff"),
        (b"rules: {a: \x07}", "control characters are not allowed"),
    ],
)
def test_bytes_that_are_no_text(mine, content, says) -> None:
    mine.write_bytes(content)
    assert says in refused(mine)


def test_what_is_no_file_is_not_read(tmp_path) -> None:
    assert "no such file" in refused(tmp_path / "gone.yaml")
    assert "is a directory" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "got a pipe, socket or device" in refused(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    assert "got a pipe, socket or device" in refused(tmp_path / "zero.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert "too many levels of symbolic links" in refused(tmp_path / "loop.yaml")
    assert "file name too long" in refused(tmp_path / ("x" * 5000))
    assert "null" in refused(tmp_path / "a\0b")


def test_plans_that_extend_each_other_end(tmp_path) -> None:
    for number in range(100):
        (tmp_path / f"{number}.yaml").write_text(f'extends: "{number + 1}"')
    assert "more than 20 plans" in refused(tmp_path / "0.yaml")


class Counted(str):
    """A text that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)


def test_names_are_not_compared_with_all_others(mine, monkeypatch) -> None:
    read = yaml.constructor.SafeConstructor.construct_scalar
    monkeypatch.setattr(yaml.constructor.SafeConstructor, "construct_scalar", lambda *each: Counted(read(*each)))
    mine.write_text("rules:\n" + "".join(f"  a{number}: colwise\n" for number in range(300)))
    assert len(Plan.from_yaml(mine).rules) == 300
    assert 0 < Counted.compared < 300 * 20


def test_plans_that_yaml_allows(mine) -> None:
    expected = Plan.from_dict({"a": "colwise", "b": "rowwise"}, source=str(mine))
    for content in (
        b"\xef\xbb\xbfrules: {a: colwise, b: rowwise}",
        b"rules:\r\n  a: colwise\r\n  b: rowwise\r\n",
        b"rules: {? a : colwise, 'b': \"rowwise\"}",
        b"rules: {a: &x colwise, b: rowwise}\nheads: {a: null, b: null}",
        b"heads: &x {b: null}\nrules: {<<: *x, a: colwise, b: rowwise}",
    ):
        mine.write_bytes(content)
        rules = yaml.safe_load(content)["rules"]
        assert {rule.pattern: rule.strategy for rule in Plan.from_yaml(mine).rules} == rules
        assert set(Plan.from_yaml(mine).rules) == set(expected.rules)
    assert Plan.from_dict({"a": {"strategy": "rowwise", "parts": 1, "unit": 1}}).rules[0].unit == 1
    mine.write_bytes(b"rules: {a: colwise, b: rowwise}\n".ljust(MAX_BYTES, b"#"))
    assert Plan.from_yaml(mine) == expected


def nested() -> dict[str, Any]:
    """A dict of itself."""
    rules: dict[str, Any] = {}
    rules["a"] = rules
    return rules


def tower() -> list[Any]:
    value: list[Any] = ["x"]
    for _ in range(30):
        value = [value] * 9
    return value


@pytest.mark.parametrize(
    "rules",
    [
        {3: "colwise"},
        {None: "colwise"},
        {"a": 1 << 50_000},
        {"a": tower()},
        {"a": {"strategy": "colwise", "parts": tower()}},
        {"a": {"strategy": "colwise", "unit": 1 << 50_000}},
        {"a": {"strategy": tower(), "input": tower()}},
        {"a": {tuple(range(1000)): 1}},
        {"\ud800": "colwise"},
        {"a": "\ud800"},
        {"x" * 10_000: "colwise"},
        nested(),
    ],
)
def test_dicts_that_are_no_plans(rules) -> None:
    with pytest.raises(PlanError, match="plan tp_plan") as caught:
        read_plan(rules)
    assert len(str(caught.value).encode()) < LONGEST


@pytest.mark.parametrize("value", [3, b"auto", [1 << 50_000], [tower()], object()])
def test_what_is_no_plan_at_all(value) -> None:
    with pytest.raises(PlanError, match="tp_plan") as caught:
        read_plan(value)
    assert len(str(caught.value)) < LONGEST


@needs("planner", "verify")
@pytest.mark.parametrize("command", ["plan", "verify"])
def test_the_commands_read_plans_alike(capsys, mine, tmp_path, command) -> None:
    llama_config(8, 4).save_pretrained(tmp_path / "model")
    mine.write_text(TEXTS["bomb of lists"][0])
    assert main([command, str(tmp_path / "model"), "--tp-size", "2", "--plan", str(mine)]) == 2
    told = capsys.readouterr().err
    assert "more than 100000 values" in told
    assert len(told) < LONGEST + len(str(mine))


def test_bounds_leave_room_for_our_plans() -> None:
    assert max(path.stat().st_size for path in available_plans().values()) < MAX_BYTES / 50


def test_our_plans_begin_with_their_model_types() -> None:
    files = sorted(set(available_plans().values()))
    told = {path: next(iter(yaml.safe_load(path.read_text()).items())) for path in files}
    assert {key for key, _ in told.values()} == {"model_type"}
    lists = {path: [found] if isinstance(found, str) else found for path, (_, found) in told.items()}
    listed = {name: path for path, names in lists.items() for name in names}
    assert listed == available_plans()
