"""Batch sharding: rewrites a plan for ranks with different batches.

Only chosen modules stay sharded:

    <chosen block>                                      -> gathers samples, around rules as in sequence parallelism
    <chosen head or embedding>      colwise_rep, ...    -> the same on the samples of all ranks
    <experts in a chosen block>     moe_all_to_all      -> the same, in place of the block around them
    everything else                 any                 -> replicate
    the base model                                      -> exchanges the numbers of samples
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from ...anatomy import fold_layers, holds_experts, is_inside
from ...errors import hint_for
from ...plans.rule import Pattern, Rule
from ...plans.rules import Plan
from ..sequence.rewrite import StackRewriter
from .batch import BatchStates
from .batch_blocks import BATCH_SHARDED, BatchGather, BatchReplicated


def shard_batch(plan: Plan, model: PreTrainedModel) -> Plan:
    """Rewrite `plan` so that its chosen modules gather the samples of all ranks.

    Raises PlanError with every module that cannot be rewritten.
    """
    return _BatchRewriter(plan, model).rewrite()


class _BatchRewriter(StackRewriter):
    """State of one `shard_batch`."""

    form = "batch-sharded"
    gather = BatchGather()
    full = BatchReplicated()
    unfit = f"no rules in it shard features and sum them, and its own is none of {', '.join(BATCH_SHARDED)}"

    def rewrite_around(self, stack: str) -> None:
        chosen_by = self.plan.options["batch_sharded"]
        if chosen_by == "experts":
            blocks = self.all_exchanging()
        else:
            blocks = list(self._all(stack) if chosen_by is True else self._named(chosen_by))
        chosen = dict.fromkeys(module_name for name in blocks for module_name in self._gathering(name))
        inner = [name for name in chosen if any(is_inside(name, outer) for outer in chosen)]
        for name in inner:
            self.faults.append(f"{fold_layers(name)}: it is in another module whose input is batch-sharded")
        for name in (name for name in chosen if name not in inner):
            rule = self.rules.get(name)
            strategy = BATCH_SHARDED.get(rule.strategy_name) if rule is not None else None
            if strategy is not None and rule is not None:
                self.rules[name] = replace(rule, strategy=strategy)
            else:
                self.rewrite_block(name, self.modules[name])
        for name in list(self.rules):
            if not any(name == outer or is_inside(name, outer) for outer in chosen):
                self.rules[name] = Rule(name, "replicate")
        mixtures = [name for name, module in self.modules.items() if holds_experts(module)]
        gathered = [name for name in mixtures if any(is_inside(name, outer) for outer in chosen)]
        self.rules[self.prefix] = Rule(self.prefix, BatchStates(mixes_routers=0 < len(gathered) < len(mixtures)))
        if not (chosen or self.faults):
            if chosen_by == "experts":
                self.faults.append("it has no experts with a rule moe_all_to_all; expert_parallel gives them one")
            else:
                self.faults.append("it has no attention, MLP or experts that rules shard")

    def _named(self, patterns: Iterable[str]) -> Iterator[str]:
        """Yield the modules that match `patterns`."""
        for pattern in patterns:
            names = list(Pattern(pattern).match(self.modules, self.prefix))
            if not names:
                known = {fold_layers(name) for name in self.modules if name}
                self.faults.append(f"{pattern}: matches no module{hint_for(self.faults, pattern, known)}")
            yield from names

    def _all(self, stack: str) -> Iterator[str]:
        """Yield the blocks of every layer that rules shard."""
        for name in self.modules:
            if name.rpartition(".")[0].rpartition(".")[0] == stack and (
                self.shards_features(name) or self.exchanging(name)
            ):
                yield name

    def _gathering(self, name: str) -> Iterator[str]:
        """Yield the module, or instead its experts that exchange tokens and its other sharded blocks."""
        if self.exchanging(name) in ([], [name]):
            yield name
            return
        for child, _ in self.modules[name].named_children():
            path = f"{name}.{child}"
            if self.shards_features(path) or self.exchanging(path):
                yield from self._gathering(path)

    def is_local(self, name: str, block: nn.Module, inner: Mapping[str, Rule]) -> bool:
        """As for sequences, but False with experts: router logits enter the loss of this rank's samples."""
        return super().is_local(name, block, inner) and not any(map(holds_experts, block.modules()))
