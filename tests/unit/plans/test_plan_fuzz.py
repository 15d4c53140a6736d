"""Mutated plans: each is one short PlanError, or has the rules that PyYAML's own reader finds in the same text."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.support.fuzz import calls, fuzz_cases, kept
from tests.support.models import llama_config
from tp_transformers import PlanError
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve
from tp_transformers.plans.yaml_file import available_plans

SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # YAML allows tabs at the end of a line; libyaml too
COUNT = 100
"""Plans a seed."""
CALLS = 100
"""Functions that may be called for each byte of a plan, and for 100 more. The plans below take a quarter of it."""
LONGEST = 4000
"""Characters of a message: 20 faults of 200."""

LLAMA = available_plans()["llama"].read_text()
TEXTS = (
    LLAMA,
    available_plans()["phi3"].read_text(),
    "extends: llama\nheads: {lm_head: null}\n",
    "rules:\n  model.layers.*.mlp.up_proj: &cut {strategy: packed_colwise, parts: [40, 60], unit: 2, widths: [a, b]}\n"
    "  model.layers.*.mlp.gate_proj: *cut\n  model.layers.*.mlp: {strategy: gather}\n",
)
WORDS = """
null ~ '' [] {} [x] [[x]] 0 -1 1.5 .nan 1e999 0x1F 010 1:2:3 99999999999999999999 true on 2020-99-01 2020-01-01
*a *cut << ? ' " [ ] { } : , # % @ ` \\ "\\ud800" "a\\0b" = ... > * ** *.* ( x.yaml llama phi3 mine ../mine /
colwise rowwise replicate packed_colwise colwise_rep expert local gather query key output fused optional strategy
"""
PHRASES = (
    "!!int x|!!float x|!!bool x|!!set {a}|!!omap [a: b]|!!binary x|!!python/name:os.system|!x y|&a x|&a [*a]|- |--- "
)
ODD = [*WORDS.split(), *PHRASES.split("|"), "{a: b}", "{<<: *cut}", "|", "\t"]


def mutated(rng: random.Random) -> bytes:
    """One of TEXTS with one change or two."""
    text = rng.choice(TEXTS)
    for _ in range(rng.choice([1, 1, 2])):
        way, lines = rng.randrange(6), text.split("\n")
        place = rng.randrange(len(lines))
        if way == 0:  # a word
            words = lines[place].split(" ")
            words[rng.randrange(len(words))] = rng.choice(ODD)
            lines[place] = " ".join(words)
        if way == 1:  # a value
            lines[place] = lines[place].partition(":")[0] + ": " + rng.choice(ODD)
        if way == 2:  # a line more, or one twice
            lines.insert(place, rng.choice([*ODD, *lines]))
        if way == 3:  # another indentation
            lines[place] = rng.choice(["", " ", "  ", "    ", "\t"]) + lines[place].lstrip()
        if way == 4:  # nesting
            levels = rng.choice([3, 20, 3000])
            lines[place] += rng.choice(["[", "{a: ", "- ", "? "]) * levels + "]" * rng.choice([0, levels])
        text = "\n".join(lines)
        if way == 5:  # values of the same data
            text = yaml.safe_dump(changed(rng, text)) if rng.random() < 0.8 else text[: rng.randrange(len(text) + 1)]
    content = bytearray(text.encode())
    if content and rng.random() < 0.1:
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def changed(rng: random.Random, text: str) -> Any:
    """The data of `text`, where it is any, with another value or name in one place."""
    try:
        data = found = yaml.safe_load(text) if "*a" not in text else {}
    except Exception:  # an earlier change
        return {}
    while isinstance(found, dict) and found:
        name = rng.choice(list(found))
        if not isinstance(found[name], dict) or rng.random() < 0.3:
            odd = rng.choice(
                [None, 0, -1, 2**70, float("nan"), True, [], {}, [1], ["a"], {"a": 1}, {3: 4}, b"x", "x" * 600]
            )
            found[rng.choice([name, name, 3, None, True, "more"])] = odd
            break
        found = found[name]
    return data


IMPLIED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("query", "key", "value", "key_value", "interleaved"), ("colwise", None, None, ())),
    "fused": ("packed_colwise", ("query", "key", "value"), None, ()),
    "output": ("rowwise", None, None, ()),
}


def by_reference(data: Any) -> dict[tuple[bool, str], tuple[Any, ...]]:
    """(counts from the base model, pattern) -> (strategy, parts, unit, widths), of data that yaml.safe_load returns."""
    own, implied = rules_by_reference(data)
    return {key: rule for key, rule in {**implied, **own}.items() if rule is not None}


def rules_by_reference(data: Any) -> tuple[dict[tuple[bool, str], Any], dict[tuple[bool, str], Any]]:
    """The rules that lines give, None for those that null takes away, and those that attention implies."""
    own: dict[tuple[bool, str], Any] = {}
    implied: dict[tuple[bool, str], Any] = {}
    if data.get("extends") is not None:
        text = available_plans()[data["extends"].removesuffix(".yaml")].read_text()
        own, implied = rules_by_reference(yaml.safe_load(text))
    for section in ("base_model", "optional", "heads", "rules"):
        for pattern, value in (data.get(section) or {}).items():
            options = value if isinstance(value, dict) else {"strategy": value}
            parts, widths = options.get("parts"), options.get("widths") or ()
            own[section in ("base_model", "optional"), pattern] = (
                (
                    options.get("strategy", "replicate"),
                    tuple(parts) if isinstance(parts, list) else parts,
                    options.get("unit"),
                    (widths,) if isinstance(widths, str) else tuple(widths),
                )
                if value is not None
                else None
            )
    for pattern, children in (data.get("attention") or {}).items():
        implied = {key: rule for key, rule in implied.items() if not key[1].startswith(f"{pattern}.")}
        for role, names in (children or {}).items():
            for name in [names] if isinstance(names, str) else names if role in IMPLIED else ():
                implied[True, f"{pattern}.{name}"] = IMPLIED.get(role)
    return own, implied


@functools.cache
def llama() -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(llama_config(8, 4))


@pytest.mark.parametrize("seed", range(2))
def test_plans_are_read_as_yaml_says_or_refused(tmp_path, seed) -> None:
    path = tmp_path / "mine.yaml"
    read = total = 0
    for case in fuzz_cases(seed, COUNT, mutated):
        total += 1
        with kept(case):
            path.write_bytes(case.content)
            outcomes: list[Plan | PlanError] = []
            work = calls(lambda found=outcomes: found.append(outcome(path)))
            assert work < CALLS * (len(case.content) + 100)
            plan = outcomes[0]
            if isinstance(plan, PlanError):
                assert str(path) in str(plan)
                assert len(str(plan)) < LONGEST
                continue
            read += 1
            assert {
                (rule.in_base_model, rule.pattern): (rule.strategy, rule.parts, rule.unit, rule.widths)
                for rule in plan.rules
            } == by_reference(yaml.load(case.content, Loader=SAFE_LOADER))
            fault = bound(plan)
            assert fault is None or len(str(fault)) < LONGEST
    assert read >= total // 20


def outcome(path: Path) -> Plan | PlanError:
    try:
        return Plan.from_yaml(path)
    except PlanError as error:
        return error


def bound(plan: Plan) -> PlanError | None:
    try:
        resolve(plan, llama(), 3)
    except PlanError as error:
        return error
    return None
