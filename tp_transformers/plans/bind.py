"""Binding of a plan to a model on the meta device: a strategy for every module, or all faults in one error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..anatomy import config_around, fold_layers, tied_parameters
from ..errors import PlanError, hint_for, list_faults
from ..ranks.group import TensorParallelGroup
from ..seams import features, plan_options
from ..slices.layout import Layout
from ..strategies import (
    STRATEGIES,
    ParamShard,
    ReplicateSumGradParallel,
    TensorParallelLayer,
)
from ..strategies.signature import FEATURES
from .attention import AttentionHeads
from .binding import Binding
from .checks import scalars_between, sum_faults, unsummed_experts
from .heads import split_attention
from .rule import UNRULED, Rule, SplitHeads
from .rules import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Resolution:
    """A plan bound to a model: the strategy of every module, and the strategy and layout of every parameter."""

    module_strategies: Mapping[str, TensorParallelLayer]
    """Module name -> the strategy that communicates around its forward."""
    param_strategies: Mapping[str, TensorParallelLayer]
    """Parameter name -> the strategy that shards it."""
    layouts: Mapping[str, Layout | None]
    """Parameter name -> the indices that each rank holds; None if it is replicated."""
    split_heads: Mapping[str, SplitHeads] = field(default_factory=dict)
    """Attention, or a module of a section that a feature adds -> its heads."""
    uncovered: tuple[str, ...] = ()
    """Parameters without a rule, which are replicated."""
    notes: tuple[str, ...] = ()
    rule_names: Mapping[str, str] = field(default_factory=dict)
    """Parameter name -> name of its strategy in the plan, if it has a rule."""
    replicated_attention: frozenset[str] = frozenset()
    """Attention modules, with their projections, that are replicated in spite of rules: they have fewer query heads
    than ranks."""
    plan: Plan = Plan("nothing", ())  # noqa: RUF009 - frozen
    """The plan after it was rewritten for its options."""
    asked: Plan = plan
    """The plan before, by which the model can be bound for another number of ranks."""

    @cached_property
    def attention(self) -> Mapping[str, AttentionHeads]:
        return {name: heads for name, heads in self.split_heads.items() if isinstance(heads, AttentionHeads)}

    @cached_property
    def keeps_order(self) -> bool:
        """True if results have the bits of one process."""
        return any(strategy.keeps_order for strategy in self.param_strategies.values())

    def shard(self, name: str, shape: torch.Size, group: TensorParallelGroup) -> ParamShard:
        """This rank's shard of the parameter `name` of `shape`."""
        shard = self.param_strategies.get(name, UNRULED).shard(name.rpartition(".")[2], shape, group)
        return replace(shard, keeps_order=self.keeps_order)


def resolve(plan: Plan, model: PreTrainedModel, size: int) -> Resolution:
    """Rewrite `plan` for its options, and bind it to the modules of `model` for `size` ranks.

    Args:
        model: a transformers model; only names and shapes are read, so it may be on the meta device.
        size: number of ranks.

    Raises:
        PlanError: for two options that exclude each other, or with every rule that does not fit.
    """
    options = [option for option in plan_options() if plan.options.get(option.name)]
    for option in reversed(options):
        excluded = " and ".join(name for name in option.excludes if plan.options.get(name))
        if excluded:
            got, fix = f"{option.name} and {excluded}", f"Leave out {excluded}: {option.excludes_because}."
            raise PlanError(f"plan {plan.source}", got=got, expected="one of them", fix=fix)
    asked = plan
    plan = plan.completed(model)
    for option in options:
        plan = option.rewrite(plan, model, size)
    return replace(bind(plan, model, size), plan=replace(plan, options={}), asked=asked)


def bind(plan: Plan, model: PreTrainedModel, size: int) -> Resolution:
    """Bind the rules of `plan` as they are; see `resolve`."""
    return _Resolver(plan, model, size).resolve()


class _Resolver(Binding):
    """The steps of a binding."""

    def resolve(self) -> Resolution:
        """Match, bind and check; see the function `resolve`."""
        self._check_architecture()
        self._match_rules()
        split_heads: dict[str, SplitHeads] = {}
        for feature in features().values():
            split_heads |= feature.split_heads(self)
        self.attention = split_attention(self)
        split_heads |= self.attention
        self.module_strategies = {name: self._bind(name, rule) for name, rule in self.module_rules.items()}
        uncovered, rule_names = [], {}
        for name in self.parameters:
            owner = name.rpartition(".")[0]
            rule = self.param_rules.get(name) or self.module_rules.get(owner)
            if rule is None:
                uncovered.append(name)
                continue
            is_own = name in self.param_rules
            self.param_strategies[name] = self._bind(owner, rule, name) if is_own else self.module_strategies[owner]
            rule_names[name] = rule.strategy_name
        self._check_modules()
        self._lay_out()
        if self.plan.declared:
            self._complete()
        self.faults.extend(sum_faults(self))
        if not self.faults:  # rules that do not fit their modules are reported alone
            for feature in features().values():
                self.faults.extend(feature.check_plan(self))
        if self.faults:
            named = "" if self.plan.declared or self.plan.source == "tp_plan" else "plan "
            title = f"{named}{self.plan.source} does not fit {type(self.model).__name__}"
            raise PlanError(list_faults(title, self.faults))
        names = ", ".join(sorted(set(map(fold_layers, self.replicated.values()))))
        more = "ranks are more than the heads, so every rank computes all of them; the rest is still split"
        return Resolution(
            self.module_strategies,
            self.param_strategies,
            self.layouts,
            split_heads,
            tuple(uncovered),
            (*((f"{names}: {self.size} {more}",) if names else ()), *self.plan.notes, *self.notes),
            rule_names,
            frozenset(self.replicated),
            self.plan,
        )

    def _match_rules(self) -> None:
        """Find the rule of each module and parameter; faults: unknown strategies, unmatched rules, two rules a name."""
        known = {fold_layers(name) for name in (*self.modules, *self.parameters) if name}
        for rule in self.plan.rules:
            pattern, strategy, is_used = rule.full(self.prefix), rule.instance, rule.optional
            if strategy is None:
                name = rule.strategy_name
                nearest = hint_for(self.faults, name, STRATEGIES)
                others = f"{nearest}; import the file that registers your own first (--import in commands)"
                hint = "".join(feature.strategy_hint(name) for feature in features().values()) or others
                self.faults.append(f"{pattern}: unknown strategy {name!r}{hint}")
                continue
            for names, matched in ((self.modules, self.module_rules), (self.parameters, self.param_rules)):
                for name in rule.match(names, self.prefix):
                    if rule.optional and not strategy.applies_to(names[name]):
                        continue
                    if name in matched:
                        self.faults.append(f"{name}: two rules match it, {matched[name].pattern} and {rule.pattern}")
                    matched[name], is_used = rule, True
            if not is_used:
                self.faults.append(f"{pattern}: matches no module or parameter{hint_for(self.faults, pattern, known)}")
        if self.plan.declared:
            self._follow_tied()

    def _check_architecture(self) -> None:
        model_type = self.model.config.model_type
        if self.plan.model_types and model_type not in self.plan.model_types:
            raise PlanError(
                f"plan {self.plan.source} is for {', '.join(self.plan.model_types)}, the model is a {model_type} "
                f'({type(self.model).__name__}). Pass tp_plan="auto", or a plan for {model_type}.'
            )

    def _follow_tied(self) -> None:
        """Shard the embedding that is tied to a sharded head; a declared plan may lack its rule."""
        rules = self.module_rules
        for target, source in tied_parameters(self.model).items():
            owner, partner = source.rpartition(".")[0], target.rpartition(".")[0]
            if partner in rules and owner not in rules and isinstance(self.modules[owner], nn.Embedding):
                rules[owner] = Rule(owner, "embedding_rowwise")

    def _complete(self) -> None:
        """Add all-reduces that a declared plan may lack: of expert outputs, of gradients of scalars between linears."""
        for name in list(unsummed_experts(self)):
            experts = STRATEGIES["moe_tp_experts"]
            self.module_strategies[name] = experts.bind(self.modules[name], self.size, name=name, ranks=self.ranks)
        for name in list(scalars_between(self)):
            strategy = ReplicateSumGradParallel().bind(self.modules[name], self.size, name=name, ranks=self.ranks)
            self.module_strategies.setdefault(name, strategy)
            for param_type, _ in self.modules[name].named_parameters():
                self.param_strategies.setdefault(f"{name}.{param_type}", strategy)

    def _bind(self, owner: str, rule: Rule, name: str | None = None) -> TensorParallelLayer:
        """Copy the rule's strategy for the module `owner`, or for its parameter `name`."""
        strategy, module, name = rule.instance or UNRULED, self.modules[owner], name or owner
        if any(f"{name}.".startswith(f"{replicated}.") for replicated in self.replicated):
            if strategy.shards_as_torch:
                self.faults.append(
                    f"{fold_layers(name)}: {self.size} ranks are more than the query heads, which torch's styles "
                    "cannot shard then; use strategies by name there, or leave the attention out"
                )
            # Its heads are replicated, but the sequence or the batch may be sharded.
            return (strategy.around_replicated or UNRULED).bind(module, self.size, name=name, ranks=self.ranks)
        if strategy.ranks.shares is not None and strategy.ranks != self.ranks:
            self.faults.append(f"{name}: with_shares is for parallelize_module; a plan has one tp_shares for all rules")
        if rule.parts is not None and strategy.parts is None:
            self.faults.append(f"{name}: {rule.strategy_name} takes no parts; use packed_colwise or packed_rowwise")
        counted = [rule.parts] if isinstance(rule.parts, str) else []
        absent = [width for width in (*rule.widths, *counted) if not isinstance(vars(module).get(width), int)]
        if absent:
            self.faults.append(f"{name}: its {type(module).__name__} has no width {', '.join(absent)}")
        return strategy.bind(
            module,
            self.size,
            name=name,
            ranks=self.ranks,
            split=self.splits.get(name),
            parts=vars(module).get(rule.parts) if isinstance(rule.parts, str) else rule.parts,
            unit=rule.unit,
            widths=rule.widths,
            config=config_around(self.modules, owner),
        )

    def _check_modules(self) -> None:
        """Check that rules fit their modules; rules for linears and embeddings must name the module, no parameter."""
        for name, strategy in self.module_strategies.items():
            try:
                strategy.check(self.modules[name])
            except ValueError as error:
                self.faults.append(f"{fold_layers(name) or 'the model'}: {error}")
            if (
                self.prefix
                and not f"{name}.".startswith(f"{self.prefix}.")
                and strategy.signature.leaves is FEATURES
                and strategy.use_local_output
            ):
                self.faults.append(f"{name}: each rank would return its own shard of the output; use colwise_rep")
        for name, rule in self.param_rules.items():
            owner = name.rpartition(".")[0]
            is_style = (rule.instance or UNRULED).shards_as_torch
            if is_style or isinstance(self.modules[owner], nn.Linear | nn.Embedding):
                self.faults.append(f"{name}: name the module, {fold_layers(owner)}: {rule.strategy_name}")

    def _lay_out(self) -> None:
        """Compute the layouts; faults: a strategy cannot shard a parameter, tied parameters have different layouts."""
        for name, strategy in self.param_strategies.items():
            try:
                self.layouts[name] = strategy.layout(name.rpartition(".")[2], self.parameters[name].shape, self.size)
            except ValueError as error:
                self.faults.append(f"{fold_layers(name)}: {error}")
        for target, source in tied_parameters(self.model).items():
            pair = self.layouts.get(target), self.layouts.get(source)
            if self.size > 1 and pair[0] != pair[1]:
                self.faults.append(
                    f"{target}: tied to {source}, but they are sharded differently "
                    f"({_draw(pair[0])} and {_draw(pair[1])}); shard both along "
                    "the vocabulary (embedding_rowwise and colwise_rep) or neither"
                )


def _draw(layout: Layout | None) -> str:
    return "replicated" if layout is None else f"dim {layout.dim} into {layout.split.widths}"
