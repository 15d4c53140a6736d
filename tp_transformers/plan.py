"""Plans: YAML or dict -> frozen rules -> one strategy for every parameter of a model, or every fault at once.

The YAML format, by example (`model_plans/llama.yaml` is a real one):

    model_type: llama                  # config.model_type, or a list of them
    extends: other                     # start from another plan; rules of the same name replace its own
    base_model:                        # names inside the base model, so that every head class matches
      layers.*.mlp.gate_proj: colwise  # `*` stands for a layer number; names match as a whole
      layers.*.mlp.gate_up_proj: {strategy: packed_colwise, parts: 2}
      layers.*.self_attn.qkv_proj: {strategy: packed_colwise, parts: [query, key, value]}
    heads:                             # names in the full model; skipped by classes that lack them
      lm_head: colwise_rep
    rules: {...}                       # names in the full model, all of which must match
    attention:                         # modules whose projections are cut by whole heads
      layers.*.self_attn: {query: q_proj, key: k_proj, value: v_proj, output: o_proj}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .errors import PlanError, describe, nearest
from .strategies import STRATEGIES, TensorParallelLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Strategy = str | TensorParallelLayer

ATTENTION_ROLES = ("query", "key", "value", "output", "fused")
"""What the children of an attention module can be; `fused` is a query-key-value projection in one."""


@dataclass(frozen=True)
class Rule:
    """One line of a plan: the modules or parameters that match `pattern` are split by `strategy`."""

    pattern: str
    strategy: Strategy
    parts: int | tuple[int | str, ...] | None = None
    """Of a fused projection: how many equal parts, their lengths, or the heads that they hold."""
    in_base_model: bool = False
    """Whether the pattern counts from the base model rather than from the full one."""
    optional: bool = False
    """Whether it may match nothing."""

    @property
    def strategy_name(self) -> str:
        """What the plan calls the strategy."""
        return self.strategy if isinstance(self.strategy, str) else repr(self.strategy)


@dataclass(frozen=True)
class Attention:
    """The modules that match `pattern` attend with heads: their projections are cut by whole heads."""

    pattern: str
    children: Mapping[str, str]
    """Role (one of ATTENTION_ROLES) -> name of the child module."""
    in_base_model: bool = False


@dataclass(frozen=True)
class Plan:
    """How an architecture is split: its rules, parsed and frozen."""

    source: str
    """What error messages call it: a file, "tp_plan", ..."""
    rules: tuple[Rule, ...]
    attention: tuple[Attention, ...] = ()
    model_types: tuple[str, ...] = ()
    """The values of `config.model_type` that it is for; empty for any."""
    declared: bool = field(default=False, compare=False)
    """Whether it is the plan that a transformers class declares, rather than one that was written for us."""

    @classmethod
    def from_dict(cls, rules: Mapping[str, Any], *, source: str = "tp_plan") -> Plan:
        """A plan from {name in the full model: strategy}. Raises PlanError on malformed rules."""
        return _parse({"rules": dict(rules)}, source)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Plan:
        """A plan from a YAML file. Raises PlanError where it is missing, not YAML, or malformed."""
        path = Path(path)
        try:
            data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
        except FileNotFoundError:
            raise PlanError(
                describe(
                    f"plan {path}",
                    got="no such file",
                    expected="a YAML file",
                    fix='Correct the path, or pass tp_plan="auto".',
                )
            ) from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise PlanError(f"plan {path} is not YAML: {error}") from error
        return _parse(data, str(path))

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> Plan | None:
        """The plan for `model.config.model_type`: ours from `model_plans/`, else what its transformers class declares.

        None where there is neither.
        """
        path = available_plans().get(model.config.model_type)
        if path is not None:
            return cls.from_yaml(path)
        declared = getattr(model, "_tp_plan", None)
        if not declared:
            return None
        source = f"the plan that {type(model).__name__} declares"
        rules = tuple(Rule(pattern, strategy, optional=True) for pattern, strategy in declared.items())
        return cls(source, rules, declared=True)

    def as_dict(self, base_model_prefix: str = "") -> dict[str, str]:
        """{name in the full model: strategy name}, in the order of the plan."""
        return {full_pattern(rule, base_model_prefix): rule.strategy_name for rule in self.rules}


def strategy_of(rule: Rule) -> TensorParallelLayer:
    """The strategy that the rule means."""
    return STRATEGIES[rule.strategy] if isinstance(rule.strategy, str) else rule.strategy


def full_pattern(rule: Rule | Attention, base_model_prefix: str) -> str:
    """The rule's pattern, counted from the full model."""
    return f"{base_model_prefix}.{rule.pattern}" if rule.in_base_model and base_model_prefix else rule.pattern


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression that matches whole names; `*` stands for one layer number."""
    return re.compile(r"\d+".join(map(re.escape, pattern.split("*"))))


def fold_layers(name: str) -> str:
    """A name with its layer numbers replaced by `*`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def match(rule: Rule | Attention, names: Mapping[str, Any], base_model_prefix: str) -> Iterator[str]:
    """The names that the rule's pattern matches as a whole."""
    matches = compile_pattern(full_pattern(rule, base_model_prefix)).fullmatch
    return (name for name in names if matches(name))


@cache
def available_plans() -> dict[str, Path]:
    """The plans that ship with the package: {model_type: YAML file}."""
    package = Path(__file__).parent
    for folder in (package / "model_plans", package.parent / "model_plans"):  # wheel, editable checkout
        if folder.is_dir():
            return {
                model_type: path
                for path in sorted(folder.glob("*.yaml"))
                for model_type in Plan.from_yaml(path).model_types
            }
    return {}


class _UniqueKeyLoader(yaml.SafeLoader):
    """A loader that refuses two rules of one name, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


_SECTIONS = ("model_type", "extends", "base_model", "heads", "rules", "attention")


def _parse(data: Any, source: str) -> Plan:
    """Turn YAML or dict data into a Plan. Raises PlanError with every fault in it."""
    if not isinstance(data, Mapping):
        raise PlanError(
            describe(f"plan {source}", got=f"a {type(data).__name__}", expected="a mapping", fix=f"See {__name__}.")
        )
    faults = [
        f"unknown section {key!r}{nearest(str(key), _SECTIONS)}; sections are {', '.join(_SECTIONS)}"
        for key in data
        if key not in _SECTIONS
    ]
    base = Plan(source, ())
    if data.get("extends"):
        base = _extended(str(data["extends"]), source)
    rules: dict[tuple[bool, str], Rule | None] = {(rule.in_base_model, rule.pattern): rule for rule in base.rules}
    for section in ("base_model", "heads", "rules"):
        in_base_model = section == "base_model"
        for pattern, value in _mapping(data, section, faults).items():
            # A rule of null takes the extended plan's rule away.
            rule = None if value is None else _parse_rule(str(pattern), value, section, faults)
            rules[in_base_model, str(pattern)] = rule
    attention = {(group.in_base_model, group.pattern): group for group in base.attention}
    for pattern, children in _mapping(data, "attention", faults).items():
        in_base_model = bool(data.get("base_model")) or bool(data.get("extends"))
        attention[in_base_model, str(pattern)] = _parse_attention(str(pattern), children, in_base_model, faults)
    model_type = data.get("model_type", ())
    if faults:
        raise PlanError(fault_list(f"plan {source} is malformed", faults))
    return Plan(
        source,
        tuple(rule for rule in rules.values() if rule is not None),
        tuple(attention.values()),
        (model_type,) if isinstance(model_type, str) else tuple(model_type),
    )


def _extended(name: str, source: str) -> Plan:
    """The plan that `extends: name` starts from: a model type with a plan, or a file beside the plan."""
    beside = Path(source).parent / (name if name.endswith(".yaml") else f"{name}.yaml")
    if beside.resolve() == Path(source).resolve():
        raise PlanError(f"plan {source} extends itself")
    if beside.is_file():
        return replace(Plan.from_yaml(beside), source=source)
    path = available_plans().get(name)
    if path is None:
        raise PlanError(f"plan {source} extends {name!r}, which is no plan{nearest(name, available_plans())}")
    return replace(Plan.from_yaml(path), source=source)


def _mapping(data: Mapping[str, Any], section: str, faults: list[str]) -> Mapping[Any, Any]:
    value = data.get(section) or {}
    if isinstance(value, Mapping):
        return value
    faults.append(f"section {section} is a {type(value).__name__}, not a mapping of names")
    return {}


def _parse_rule(pattern: str, value: Any, section: str, faults: list[str]) -> Rule | None:
    parts: Any = None
    strategy = value
    if isinstance(value, Mapping):
        unknown = set(value) - {"strategy", "parts"}
        if unknown or "strategy" not in value:
            faults.append(f"{pattern}: a rule has `strategy` and perhaps `parts`, not {sorted(map(str, value))}")
            return None
        strategy, parts = value["strategy"], value.get("parts")
        if isinstance(parts, list | tuple):
            parts = tuple(parts)
    if not isinstance(strategy, str | TensorParallelLayer):
        faults.append(f"{pattern}: the strategy is {strategy!r}, neither a name nor a TensorParallelLayer")
        return None
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        faults.append(f"{pattern}: unknown strategy {strategy!r}{nearest(strategy, STRATEGIES)}")
        return None
    return Rule(pattern, strategy, parts, in_base_model=section == "base_model", optional=section == "heads")


def _parse_attention(pattern: str, children: Any, in_base_model: bool, faults: list[str]) -> Attention:
    if not isinstance(children, Mapping) or not set(children) <= set(ATTENTION_ROLES):
        faults.append(f"attention {pattern}: {children!r} does not map {', '.join(ATTENTION_ROLES)} to child names")
        children = {}
    return Attention(pattern, dict(children), in_base_model)


def fault_list(title: str, faults: Iterable[str]) -> str:
    """One message of all `faults`, each told once."""
    lines = sorted(set(faults))
    count = f"{len(lines)} fault" + "s" * (len(lines) > 1)
    return f"{title}, {count}:" + "".join(f"\n  - {line}" for line in lines)
