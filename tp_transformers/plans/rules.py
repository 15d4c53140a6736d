"""Plans: all rules of an architecture, with the plans of its inner models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..anatomy import base_prefix, inner_models, is_inside
from ..errors import PlanError, list_faults, nearest, shorten, shown
from ..seams import added
from ..slices.layout import Ranks
from .attention import Attention
from .parse import DECLARED, IN_BASE_MODEL, RULES, check_sections, entries, is_name, names_of, parse_rule
from .rule import Entry, Rule
from .yaml_file import available_plans, read_plan_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

P = TypeVar("P", Rule, Entry)

MOST_EXTENDED = 20
"""Maximum length of a chain of plans that extend each other."""


@dataclass(frozen=True)
class Plan:
    """The rules that shard an architecture, parsed and frozen."""

    source: str
    """Name in error messages: a file, "tp_plan", ..."""
    rules: tuple[Rule, ...]
    entries: tuple[Entry, ...] = ()
    """Attention modules, and entries of sections that features add."""
    model_types: tuple[str, ...] = ()
    """Values of `config.model_type` that the plan supports; empty: any."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a load that rewrite the rules when the plan is bound: name without `tp_` -> value."""
    notes: tuple[str, ...] = ()
    """Notes for the user of options that rewrote the rules."""
    shares: tuple[float, ...] | None = None
    """The share of each rank in every split; None: even splits."""
    inner_models: tuple[str, ...] = ()
    """Full names of the inner models that have plans."""
    declared: bool = field(default=False, compare=False)
    """True for the plan that a transformers class declares, and for a plan of this package that extends it."""
    extends_declared: bool = field(default=False, compare=False)
    """True until `completed` adds the rules that the model's class declares."""

    @classmethod
    def from_dict(cls, rules: Mapping[str, Any], *, source: str = "tp_plan") -> Plan:
        """Make a plan from {name in the full model: strategy}. Raises PlanError on malformed rules."""
        return cls.parse({"rules": dict(rules)}, source=source)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Plan:
        """Read a plan from a YAML file. Raises PlanError if it cannot be read, is not YAML, or is malformed."""
        path = Path(path)
        return cls.parse(read_plan_file(path), source=str(path))

    @classmethod
    def parse(cls, data: Any, *, source: str, extending: tuple[Path, ...] = ()) -> Plan:
        """Make a plan from data in the form of the YAML files. Raises PlanError with all faults of the data.

        `extending`: the chain of files with `extends:` that led here.
        """
        faults = check_sections(data, source, sections())
        base = cls(source, ())
        if data.get("extends") == DECLARED:
            base = cls(source, (), declared=True, extends_declared=True)
        elif is_name(data.get("extends")):
            base = _extended(data["extends"], source, extending)
        elif data.get("extends") is not None:
            faults.append(f"extends is {shown(data['extends'])}, not the name of a plan")
        rules: dict[tuple[bool, str], Rule | None] = {(rule.in_base_model, rule.pattern): rule for rule in base.rules}
        for section in RULES:
            for pattern, value in entries(data, section, faults):
                # null removes the extended plan's rule.
                rule = None if value is None else parse_rule(pattern, value, section, faults)
                rules[section in IN_BASE_MODEL, pattern] = rule
        described: dict[tuple[str, str], Entry | None] = {
            (entry.section, entry.pattern): entry for entry in base.entries
        }
        for section, kind in sections().items():
            for pattern, value in entries(data, section, faults):
                described[section, pattern] = entry = None if value is None else kind.parse(pattern, value, faults)
                _imply(rules, section, pattern, () if entry is None else entry.rules())
        model_types = names_of(data.get("model_type") or ())
        if model_types is None:
            faults.append(f"model_type is {shown(data['model_type'])}, neither a name nor a list of names")
        if faults:
            raise PlanError(list_faults(f"plan {shorten(source, 200)} is malformed", faults, most=5))
        return cls(
            source,
            tuple(rule for rule in rules.values() if rule is not None),
            tuple(entry for entry in described.values() if entry is not None),
            model_types or (),
            declared=base.declared,
            extends_declared=base.extends_declared,
        )

    def with_options(self, **options: Any) -> Plan:
        """The plan with options of a load, as `invariant=True`: the rules are rewritten when the plan is bound."""
        return replace(self, options={**self.options, **options})

    @classmethod
    def for_model(cls, model: PreTrainedModel, path: Path | None = None) -> Plan | None:
        """The plan for `model.config.model_type` from `model_plans/`, or else the one that its class declares.

        With `path`, the plan of that file. Inner models (a language model, a vision tower) are sharded by the plans for
        their own types. None if there are no rules.
        """
        path = path or available_plans().get(model.config.model_type)
        base = cls("", (), declared=True, extends_declared=True) if path is None else cls.from_yaml(path)
        plan = base.completed(model)._with_inner_models(model, base.rules)
        return plan if plan.rules else None

    def completed(self, model: PreTrainedModel) -> Plan:
        """Add the rules that the class of `model` declares, if the plan extends them, and the rules that entries
        of other sections imply, for modules without explicit rules."""
        if not (self.extends_declared or any(rule.implied for rule in self.rules)):
            return self
        prefix, source = base_prefix(model), self.source
        rules = [rule for rule in self.rules if not rule.implied]
        if self.extends_declared:
            declared: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
            explicit = {rule.full(prefix) for rule in self.rules}
            rules += [
                Rule(name, strategy=strategy, optional=True)
                for name, strategy in declared.items()
                if name not in explicit
            ]
            source = f"the plan that {type(model).__name__} declares"
            source = f"plan {self.source}, with {source}" if self.source else source
        names = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
        ruled = {name for rule in rules for name in rule.match(names, prefix)}
        for rule in (rule for rule in self.rules if rule.implied):
            matched = list(rule.match(names, prefix))
            free = [name for name in matched if name not in ruled]
            if len(free) < len(matched):
                rules += [replace(rule, pattern=name, in_base_model=False, implied="") for name in free]
            elif matched:
                rules.append(replace(rule, implied=""))
        return replace(self, source=source, rules=tuple(rules), extends_declared=False)

    def _with_inner_models(self, model: PreTrainedModel, explicit: Sequence[Rule]) -> Plan:
        """Add the plans for the inner models of `model`, with full names.

        An inner model with rules in this plan keeps only those, unless this plan is declared: then the explicit rules
        `explicit` take precedence over rules for the same names. The plan of the language model also shards the output
        embedding.

            llava ─┬─ vision_tower    clip_vision_model ── clip_vision_model.yaml, at model.vision_tower
                   └─ language_model  llama             ── llama.yaml, at model.language_model, and its lm_head
        """
        prefix, inner_names = base_prefix(model), list[str]()
        ruled = [rule.full(prefix) for rule in self.rules if not self.declared]
        rules, described = list[Rule](), list[Entry]()
        for name, inner_model in inner_models(model):
            is_ruled = any(is_inside(name, outer) for outer in inner_names) or any(
                is_inside(rule, name) for rule in ruled
            )
            kind = inner_model.config.model_type
            is_planned = isinstance(kind, str) and kind in available_plans()
            plan = Plan.for_model(inner_model) if is_planned and not is_ruled else None
            if plan is None:
                continue
            inner_names += [name, *(f"{name}.{inner}" for inner in plan.inner_models)]
            rules += [_nested(name, rule, inner_model) for rule in plan.rules]
            described += [_nested(name, entry, inner_model) for entry in plan.entries]
            if inner_model.config is model.config.get_text_config():
                rules += [replace(rule, optional=True) for rule in plan.rules if not rule.in_base_model]
        if not inner_names:
            return self
        written = {rule.full(prefix) for rule in explicit if self.declared}
        theirs = {rule.pattern: rule for rule in rules if rule.pattern not in written}
        combined = replace(self, inner_models=tuple(inner_names), entries=(*self.entries, *described))
        by_name = ((rule.full(prefix), rule) for rule in self.rules)
        around = combined.inner_model_around
        ours = (rule for name, rule in by_name if name in written or not (name in theirs or around(name)))
        source = f"{self.source}, with ours for {', '.join(inner_names)}" if self.declared else self.source
        return replace(combined, source=source, rules=(*ours, *theirs.values()))

    def inner_model_around(self, name: str) -> str:
        """The inner model around a module, parameter or pattern of that name; "" if there is none."""
        return max((inner for inner in self.inner_models if is_inside(name, inner)), key=len, default="")

    @property
    def attention(self) -> tuple[Attention, ...]:
        """Attention modules; if empty, they are recognised by the names of their projections."""
        return tuple(entry for entry in self.entries if isinstance(entry, Attention))

    def ranks(self, size: int) -> Ranks:
        """`size` ranks with the plan's shares. Raises PlanError if these are not `size` numbers."""
        if self.shares is None:
            return Ranks(size)
        if len(self.shares) != size:
            got, fix = f"{len(self.shares)} shares", "Give as many numbers as there are ranks: tp_shares or --shares."
            raise PlanError("tp_shares", got=got, expected=f"{size}, one for each of {size} ranks", fix=fix)
        return Ranks.of(self.shares)

    def as_dict(self, base_model_prefix: str = "") -> dict[str, str]:
        """{name in the full model: strategy name}, in the order of the plan."""
        return {rule.full(base_model_prefix): rule.strategy_name for rule in self.rules}


@cache
def sections() -> Mapping[str, type[Entry]]:
    """Sections of plans beside those of rules: name -> class of its entries."""
    kinds: list[type[Entry]] = [Attention, *added("sections")]
    return {kind.section: kind for kind in kinds}


def _nested(name: str, entry: P, inner_model: PreTrainedModel) -> P:
    """Turn an entry of the plan for `inner_model`, at `name`, into an optional entry for the full model."""
    return replace(entry, pattern=f"{name}.{entry.full(base_prefix(inner_model))}", in_base_model=False, optional=True)


def _imply(rules: dict[tuple[bool, str], Rule | None], section: str, pattern: str, implied: Iterable[Rule]) -> None:
    """Add the rules that an entry at `pattern` implies; they replace those of the extended plan's entry."""
    for key in [key for key, rule in rules.items() if rule and rule.implied == section and is_inside(key[1], pattern)]:
        del rules[key]
    for rule in implied:
        rules.setdefault((True, rule.pattern), replace(rule, implied=section))


def _extended(name: str, source: str, extending: tuple[Path, ...]) -> Plan:
    """Load the plan of `extends: name`: a file in the same folder, or the plan for a model type."""
    own_path = Path(source).resolve()
    path: Path | None = own_path.parent / (name if name.endswith(".yaml") else f"{name}.yaml")
    if not os.path.isfile(str(path)):  # also False for invalid file names
        path = available_plans().get(name)
    subject = f"plan {shorten(source, 200)}"
    if path is None:
        raise PlanError(f"{subject} extends {shown(name)}, which is no plan{nearest(name, available_plans())}")
    chain = (*extending, own_path)
    if path.resolve() in chain:
        steps = shorten(" -> ".join(step.name for step in (*chain, path)), 200)
        raise PlanError(f"{subject} extends itself: {steps}")
    if len(chain) > MOST_EXTENDED:
        raise PlanError(f"{subject} is the last of more than {MOST_EXTENDED} plans that extend each other")
    return replace(Plan.parse(read_plan_file(path), source=str(path), extending=chain), source=source)
