"""Plans: frozen rules, and which names of a model they match."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.tensor.parallel import ParallelStyle

from ..anatomy.classes import inner_models
from ..anatomy.names import base_prefix, is_inside
from ..errors import PlanError, list_faults, nearest, shorten, shown
from ..strategies import STRATEGIES, ReplicateParallel, TensorParallelLayer, as_strategy
from .catalogue import available_plans
from .parse import (
    DECLARED,
    IN_BASE_MODEL,
    OPTIONS,
    attention_arguments,
    check_sections,
    entries,
    implied_rules,
    is_name,
    is_names,
    names_of,
    rule_arguments,
)
from .pattern import Pattern
from .yaml_file import read_plan_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel


P = TypeVar("P", "Rule", "Attention")

MOST_EXTENDED = 20
"""Plans that extend each other, one after the other."""

UNRULED: TensorParallelLayer = ReplicateParallel()
"""Strategy of a module that no rule covers."""


@dataclass(frozen=True)
class Rule(Pattern):
    """One line of a plan: the modules or parameters that match `pattern` are split by `strategy`."""

    strategy: str | ParallelStyle
    """A strategy's name, an object of one, or of a style of torch, which becomes a strategy."""
    parts: int | str | tuple[int | str, ...] | None = None
    """Parts of a fused projection: their number, if they are equal, or the attribute of the module that counts them;
    their lengths, or the heads that they hold."""
    unit: int | None = None
    """Indices that stay together on a rank."""
    widths: tuple[str, ...] = ()
    """Attributes of the module that are a width, and that are this rank's part of it in its forward."""
    batch_sharded: bool = False
    """True if every rank has samples of its own, which the module gathers."""
    optional: bool = False
    implied: bool = field(default=False, compare=False)
    """True for a rule that the plan's attention implies, for modules without a rule of their own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", as_strategy(self.strategy))

    @property
    def strategy_name(self) -> str:
        return self.strategy if isinstance(self.strategy, str) else repr(self.strategy)

    @property
    def instance(self) -> TensorParallelLayer | None:
        """The strategy itself; None where there is none of that name."""
        return STRATEGIES.get(self.strategy) if isinstance(self.strategy, str) else as_strategy(self.strategy)


@dataclass(frozen=True)
class Attention(Pattern):
    """The modules that match `pattern` attend with heads: their projections are cut by whole heads."""

    children: Mapping[str, tuple[str, ...]]
    """Role (one of ATTENTION_ROLES) -> names of child modules or parameters."""
    optional: bool = False
    gathered: bool = False
    """True if projections are cut, but their outputs gathered, so that every rank computes with all heads."""


@dataclass(frozen=True)
class Plan:
    """How an architecture is split: its rules, parsed and frozen."""

    source: str
    """Name in error messages: a file, "tp_plan", ..."""
    rules: tuple[Rule, ...]
    attention: tuple[Attention, ...] = ()
    """Empty: attention is recognised by the names of its projections."""
    model_types: tuple[str, ...] = ()
    """The values of `config.model_type` that it is for; empty for any."""
    sequence_parallel: bool = False
    """True if activations between blocks are cut along the sequence."""
    loss_parallel: bool = False
    """True if logits stay cut along the vocabulary where a model is given labels."""
    batch_sharded: bool | tuple[str, ...] | None = None
    """The modules, named in the full model, that gather the samples of ranks which have batches of their own, beside
    those whose rules say so; True for all attention, MLPs and experts; False for none, whatever rules say."""
    parts: tuple[str, ...] = ()
    """Modules, named in the full model, that are models with plans of their own."""
    declared: bool = field(default=False, compare=False)
    """True for the plan that a transformers class declares, and for one of ours that completes it."""
    extends_declared: bool = field(default=False, compare=False)
    """True until `completed` adds the rules that it extends, those that the model's class declares."""

    @classmethod
    def from_dict(cls, rules: Mapping[str, Any], *, source: str = "tp_plan") -> Plan:
        """A plan from {name in the full model: strategy}. Raises PlanError on malformed rules."""
        return cls.parse({"rules": dict(rules)}, source=source)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Plan:
        """A plan from a YAML file. Raises PlanError where it cannot be read, is not YAML, or is malformed."""
        path = Path(path)
        return cls.parse(read_plan_file(path), source=str(path))

    @classmethod
    def parse(cls, data: Any, *, source: str, extending: tuple[Path, ...] = ()) -> Plan:
        """A plan from data in the form of the YAML files. Raises PlanError with every fault of the form.

        `extending` are the files whose `extends:` led here.
        """
        faults = check_sections(data, source)
        base = cls(source, ())
        if data.get("extends") == DECLARED:
            base = cls(source, (), declared=True, extends_declared=True)
        elif is_name(data.get("extends")):
            base = _extended(data["extends"], source, extending)
        elif data.get("extends") is not None:
            faults.append(f"extends is {shown(data['extends'])}, not the name of a plan")
        rules: dict[tuple[bool, str], Rule | None] = {(rule.in_base_model, rule.pattern): rule for rule in base.rules}
        for section in ("base_model", "optional", "heads", "rules"):
            for pattern, value in entries(data, section, faults):
                # A rule of null takes the extended plan's rule away.
                found = None if value is None else rule_arguments(pattern, value, section, faults)
                rules[section in IN_BASE_MODEL, pattern] = None if found is None else Rule(**found)
        attention: dict[str, Attention | None] = {entry.pattern: entry for entry in base.attention}
        for pattern, children in entries(data, "attention", faults):
            entry = None if children is None else Attention(**attention_arguments(pattern, children, faults))
            attention[pattern] = entry
            # What the extended plan's entry implied goes with it.
            implied = [key for key, rule in rules.items() if rule and rule.implied and is_inside(key[1], pattern)]
            for key in implied:
                del rules[key]
            for found in () if entry is None else implied_rules(pattern, entry.children, entry.gathered):
                rules.setdefault((True, found["pattern"]), Rule(**found))
        options = {option: data.get(option, getattr(base, option)) for option in OPTIONS}
        faults.extend(
            f"{name} is {shown(value)}, not true or false"
            for name, value in options.items()
            if not isinstance(value, bool)
        )
        batch = data.get("batch_sharded", base.batch_sharded)
        if not (batch is None or isinstance(batch, bool) or is_names(batch)):
            faults.append(f"batch_sharded is {shown(batch)}, not true, false, or a list of modules")
        model_types = names_of(data.get("model_type") or ())
        if model_types is None:
            faults.append(f"model_type is {shown(data['model_type'])}, neither a name nor a list of names")
        if faults:
            raise PlanError(list_faults(f"plan {shorten(source, 200)} is malformed", faults, most=5))
        return cls(
            source,
            tuple(rule for rule in rules.values() if rule is not None),
            tuple(entry for entry in attention.values() if entry is not None),
            model_types or (),
            **options,
            batch_sharded=tuple(batch) if isinstance(batch, list | tuple) else batch,
            declared=base.declared,
            extends_declared=base.extends_declared,
        )

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> Plan | None:
        """The plan for `model.config.model_type`: ours from `model_plans/`, else what its transformers class declares.

        Models inside it (a language model, a vision tower) are cut by our plans for their own types. None where there
        is no rule at all.
        """
        path = available_plans().get(model.config.model_type)
        whole = cls("", (), declared=True, extends_declared=True) if path is None else cls.from_yaml(path)
        plan = whole.completed(model)._with_parts(model, whole.rules)
        return plan if plan.rules else None

    def completed(self, model: PreTrainedModel) -> Plan:
        """This plan with all of its rules: those that the class of `model` declares, if it extends them, and those that
        its attention implies, for modules that have none of their own."""
        if not (self.extends_declared or any(rule.implied for rule in self.rules)):
            return self
        prefix, source = base_prefix(model), self.source
        rules = [rule for rule in self.rules if not rule.implied]
        if self.extends_declared:
            declared: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
            own = {rule.full(prefix) for rule in self.rules}
            rules += [Rule(name, strategy=each, optional=True) for name, each in declared.items() if name not in own]
            source = f"the plan that {type(model).__name__} declares"
            source = f"plan {self.source}, with {source}" if self.source else source
        names = [name for name, _ in model.named_modules()]
        ruled = {name for rule in rules for name in rule.match(names, prefix)}
        for rule in self.rules:
            matched = list(rule.match(names, prefix)) if rule.implied else []
            if ruled.isdisjoint(matched):
                rules += [replace(rule, implied=False)] if matched else []
            else:
                free = (name for name in matched if name not in ruled)
                rules += [replace(rule, pattern=name, in_base_model=False, implied=False) for name in free]
        return replace(self, source=source, rules=tuple(rules), extends_declared=False)

    def _with_parts(self, model: PreTrainedModel, own: Sequence[Rule]) -> Plan:
        """This plan with our plans for the parts of `model`, at the names that they have in it.

        A part in which this plan has rules keeps those, unless it completes a declared plan: then its `own` rules come
        before those of the parts. The plan of the language model cuts the output embedding, too.

            llava ─┬─ vision_tower    clip_vision_model ── clip_vision_model.yaml, at model.vision_tower
                   └─ language_model  llama             ── llama.yaml, at model.language_model, and its lm_head
        """
        prefix, parts = base_prefix(model), list[str]()
        ruled = [rule.full(prefix) for rule in self.rules if not self.declared]
        rules: list[Rule] = []
        attention: list[Attention] = []
        for name, part in inner_models(model):
            is_ruled = any(is_inside(name, other) for other in parts) or any(is_inside(rule, name) for rule in ruled)
            kind = part.config.model_type
            is_planned = isinstance(kind, str) and kind in available_plans()
            plan = Plan.for_model(part) if is_planned and not is_ruled else None
            if plan is None:
                continue
            parts += [name, *(f"{name}.{inner}" for inner in plan.parts)]
            rules += [_at(name, rule, part) for rule in plan.rules]
            attention += [_at(name, entry, part) for entry in plan.attention]
            if part.config is model.config.get_text_config():
                rules += [replace(rule, optional=True) for rule in plan.rules if not rule.in_base_model]
        if not parts:
            return self
        written = {rule.full(prefix) for rule in own if self.declared}
        rules = [rule for rule in rules if rule.pattern not in written]
        added = {rule.pattern for rule in rules}
        whole = replace(self, parts=tuple(parts))
        others = (
            rule for rule in self.rules if rule.full(prefix) in written or not whole.part_around(rule.full(prefix))
        )
        return replace(
            whole,
            source=f"{self.source}, with ours for {', '.join(parts)}" if self.declared else self.source,
            rules=(*(rule for rule in others if rule.pattern not in added), *rules),
            attention=(*self.attention, *attention),
        )

    def part_around(self, name: str) -> str:
        """The part that a module, parameter or pattern of that name belongs to; "" for what is in none."""
        return max((part for part in self.parts if is_inside(name, part)), key=len, default="")

    def names_attention(self, name: str, prefix: str) -> bool:
        """True if the plan for what is around the module `name`, a part or the model, names its attention."""
        return any(self.part_around(entry.full(prefix)) == self.part_around(name) for entry in self.attention)

    def as_dict(self, base_model_prefix: str = "") -> dict[str, str]:
        """{name in the full model: strategy name}, in the order of the plan."""
        return {rule.full(base_model_prefix): rule.strategy_name for rule in self.rules}


def _at(name: str, entry: P, part: PreTrainedModel) -> P:
    """An entry of a part's plan, as one of the model around the part `name`, where modules of it may be missing."""
    return replace(entry, pattern=f"{name}.{entry.full(base_prefix(part))}", in_base_model=False, optional=True)


def _extended(name: str, source: str, extending: tuple[Path, ...]) -> Plan:
    """The plan that `extends: name` starts from: a file beside the plan, or a model type with a plan."""
    own = Path(source).resolve()
    path: Path | None = own.parent / (name if name.endswith(".yaml") else f"{name}.yaml")
    if not os.path.isfile(str(path)):  # False, too, for names that no file can have
        path = available_plans().get(name)
    subject = f"plan {shorten(source, 200)}"
    if path is None:
        raise PlanError(f"{subject} extends {shown(name)}, which is no plan{nearest(name, available_plans())}")
    chain = (*extending, own)
    if path.resolve() in chain:
        steps = shorten(" -> ".join(step.name for step in (*chain, path)), 200)
        raise PlanError(f"{subject} extends itself: {steps}")
    if len(chain) > MOST_EXTENDED:
        raise PlanError(f"{subject} is the last of more than {MOST_EXTENDED} plans that extend each other")
    return replace(Plan.parse(read_plan_file(path), source=str(path), extending=chain), source=source)
