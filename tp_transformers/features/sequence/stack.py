"""Base class for rewriting a plan around its one stack of layers: blocks compute locally, and communicate around."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature

from torch import nn

from ...anatomy import features, fold_layers, is_inside, stacks
from ...plans.rule import Rule
from ...strategies import TensorParallelLayer
from ...strategies.signature import FEATURES
from ..rewriting.rewriter import Rewriter

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


class StackRewriter(Rewriter):
    """Base class for options that shard activations between the layers of a model."""

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
