"""Base class for what an option makes of a plan: it rewrites rules by the names that they match."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from ...anatomy import base_prefix, folded
from ...errors import PlanError, list_faults
from ...plans.rule import Pattern, Rule
from ...plans.rules import Plan
from ...strategies import TensorParallelLayer


class Rewriter(ABC):
    """State of one rewriting: the rules by the names that they match, and the faults."""

    form: str
    """Name of the rewritten plan in errors."""

    def __init__(self, plan: Plan, model: PreTrainedModel) -> None:
        self.plan, self.model, self.prefix = plan, model, base_prefix(model)
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.names = [*self.modules, *dict(model.named_parameters(remove_duplicate=False))]
        self.rules = {name: rule for rule in plan.rules for name in rule.match(self.names, self.prefix)}
        self.faults: list[str] = []

    def rewrite(self) -> Plan:
        """Return the rewritten plan. Raises PlanError with all faults."""
        counts = Counter(name for rule in self.plan.rules for name in rule.match(self.names, self.prefix))
        if any(rule.instance is None for rule in self.plan.rules) or any(count > 1 for count in counts.values()):
            return self.plan  # `resolve` reports these faults
        self.rewrite_rules()
        if self.faults:
            title = f"plan {self.plan.source} cannot be made {self.form} for {type(self.model).__name__}"
            raise PlanError(list_faults(title, self.faults))
        matched = {id(rule) for rule in self.plan.rules if any(rule.match(self.names, self.prefix))}
        unmatched = tuple(rule for rule in self.plan.rules if id(rule) not in matched)
        return replace(self.plan, rules=(*self._folded(), *unmatched))

    @abstractmethod
    def rewrite_rules(self) -> None:
        """Change the rules; add faults where they cannot be changed."""

    def set(self, name: str, strategy: str | TensorParallelLayer) -> None:
        self.rules[name] = Rule(name, strategy)

    def _folded(self) -> Iterator[Rule]:
        """Yield the rules, with one rule for all layers if their rules are equal."""
        plain = ((name, replace(rule, pattern="", in_base_model=False)) for name, rule in self.rules.items())
        for pattern, groups in folded(plain).items():
            names = {name for group in groups.values() for name in group}
            if len(groups) == 1 and set(Pattern(pattern).match(self.names, "")) == names:
                yield replace(next(iter(groups)), pattern=pattern)
            else:
                ordered = (name for name in self.rules if name in names)
                yield from (replace(self.rules[name], pattern=name, in_base_model=False) for name in ordered)
