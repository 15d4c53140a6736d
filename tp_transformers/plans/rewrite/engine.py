"""Base class for the options of a plan: it rewrites rules by the names that they match.

`sequence.py`, `batch.py` and `invariant.py` have an option each; `loss.py` does not need it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING

from torch import nn

from ...anatomy.layers import stacks
from ...anatomy.linears import features
from ...anatomy.names import base_prefix, fold_layers, folded, is_inside
from ...errors import PlanError, list_faults
from ...strategies import TensorParallelLayer
from ...strategies.signature import FEATURES
from ..pattern import Pattern
from ..rule import Rule
from ..rules import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOCAL = {
    "colwise": "local_colwise",
    "rowwise": "local_rowwise",
    "packed_colwise": "local_packed_colwise",
    "packed_rowwise": "local_packed_rowwise",
}
"""Strategy of a rule -> its strategy if the block around it communicates."""
_BETWEEN = {"replicated_with_grad_allreduce", "sharded_norm", "channelwise", "gated_norm", "rowwise_inner"}
_LOCAL_ALREADY = {*_LOCAL.values(), *_BETWEEN}
"""Strategies that do not change in such a block."""


class Rewriter(ABC):
    """State of one rewriting: the rules by the names that they match, and the faults."""

    form: str
    done: Mapping[str, object]
    """Options of the plan once it is rewritten."""

    def __init__(self, plan: Plan, model: PreTrainedModel) -> None:
        self.plan, self.model, self.prefix = plan, model, base_prefix(model)
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.names = [*self.modules, *dict(model.named_parameters(remove_duplicate=False))]
        self.rules = {name: rule for rule in plan.rules for name in rule.match(self.names, self.prefix)}
        self.faults: list[str] = []

    def rewrite(self) -> Plan:
        """Return the rewritten plan. Raises PlanError with all faults."""
        counts = Counter(name for rule in self.plan.rules for name in rule.match(self.names, self.prefix))
        done = replace(self.plan, **self.done)  # type: ignore[arg-type]
        if any(rule.instance is None for rule in self.plan.rules) or any(count > 1 for count in counts.values()):
            return done  # `resolve` reports these faults
        self.rewrite_rules()
        if self.faults:
            title = f"plan {self.plan.source} cannot be made {self.form} for {type(self.model).__name__}"
            raise PlanError(list_faults(title, self.faults))
        matched = {id(rule) for rule in self.plan.rules if any(rule.match(self.names, self.prefix))}
        unmatched = tuple(rule for rule in self.plan.rules if id(rule) not in matched)
        return replace(done, rules=(*self._folded(), *unmatched))

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


class StackRewriter(Rewriter):
    """Base class for the options that shard activations between the layers of a model."""

    done: Mapping[str, object] = {"sequence_parallel": False, "batch_sharded": None}
    gather: str | TensorParallelLayer
    """Strategy around blocks that compute locally."""
    full: str | TensorParallelLayer
    """Strategy around other blocks."""
    unfit: str
    """Fault of a block without rules that shard and sum features."""

    def rewrite_rules(self) -> None:
        stack = self._stack()
        if getattr(self.model.config, "is_encoder_decoder", False):
            self.faults.append("it has an encoder and a decoder")
        if stack is not None:
            self.rewrite_around(stack)

    @abstractmethod
    def rewrite_around(self, stack: str) -> None:
        """Change the rules of the layers of `stack`, and of the modules before and after them."""

    def _stack(self) -> str | None:
        """The only stack of layers with rules, or the only stack if none has rules; None, and a fault, for several."""
        lists = [name for name, _ in stacks(self.model)]
        sharded = [name for name in lists if any(is_inside(rule, name) for rule in self.rules)] or lists
        if len(sharded) == 1 and sharded[0].rpartition(".")[0] == self.prefix:
            return sharded[0]
        self.faults.append(f"it has {', '.join(sharded) or 'nothing'} where the base model's one stack of layers is")
        return None

    def exchanging(self, name: str) -> list[str]:
        """Experts at or inside the module `name` with rules that exchange tokens between ranks."""
        return [path for path in self.all_exchanging() if path == name or is_inside(path, name)]

    def all_exchanging(self) -> list[str]:
        """All experts with rules that exchange tokens between ranks."""
        rules = ((path, rule.instance) for path, rule in self.rules.items())
        return [path for path, strategy in rules if strategy is not None and strategy.signature.exchanges_tokens]

    def shards_features(self, name: str) -> bool:
        """True if a rule inside the module `name` shards features."""
        inner = (rule.instance for path, rule in self.rules.items() if is_inside(path, name))
        return any(strategy is not None and strategy.signature.leaves is FEATURES for strategy in inner)

    def rewrite_block(self, name: str, block: nn.Module) -> None:
        """Set a strategy that communicates around a block, which computes locally if it can, else on full input."""
        inner = {rule: self.rules[rule] for rule in self.rules if is_inside(rule, name)}
        own = self.rules.get(name)
        makes = [rule for rule in inner.values() if rule.instance and rule.instance.signature.leaves is FEATURES]
        sums = [rule for rule in inner.values() if rule.instance and rule.instance.signature.takes is FEATURES]
        if features(block) is not None or not (makes and sums):
            self.faults.append(f"{fold_layers(name)}: {self.unfit}")
        elif own is not None and own.strategy not in ("gather", "replicate"):
            self.faults.append(f"{fold_layers(name)}: {own.strategy_name} is a rule for the block itself")
        elif "residual" in signature(type(block).forward).parameters:
            self.faults.append(f"{fold_layers(name)}: it adds a residual that it is given")
        elif self.is_local(name, block, inner):
            for path, rule in inner.items():
                self.rules[path] = replace(rule, strategy=_LOCAL.get(str(rule.strategy), rule.strategy))
            self.set(name, self.gather)
        elif own is not None and own.strategy == "gather":
            self.faults.append(f"{fold_layers(name)}: gather encloses rules that do not all compute locally")
        else:
            self.set(name, self.full)

    def is_local(self, name: str, block: nn.Module, inner: Mapping[str, Rule]) -> bool:
        """True if all parameters of the block can compute locally, with a partial sum as output.

        Dropout of the output is allowed: all ranks drop the same elements of their partial sums.
        """
        parameters = {f"{name}.{param}" for param, _ in block.named_parameters()}
        ruled = {param for param in parameters if param in inner or param.rpartition(".")[0] in inner}
        return ruled == parameters and all(rule.strategy in {*_LOCAL, *_LOCAL_ALREADY} for rule in inner.values())
