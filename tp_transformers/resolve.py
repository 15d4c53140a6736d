"""A plan and a meta-device model -> one bound strategy for every module, or every fault in one error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from .attention import AttentionCut, AttentionHeads, cut_attention
from .errors import PlanError, nearest
from .layout import Layout
from .plan import Plan, Rule, fault_list, fold_layers, full_pattern, match, strategy_of
from .strategies import ColwiseParallel, ReplicateParallel, RowwiseParallel, TensorParallelLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Resolution:
    """A plan that fits a model: what happens to every module and parameter."""

    plan: Plan
    layers: Mapping[str, TensorParallelLayer]
    """Module name -> the strategy that communicates around its forward."""
    slicers: Mapping[str, TensorParallelLayer]
    """Parameter name -> the strategy that cuts it."""
    attention: Mapping[str, AttentionHeads]
    """Attention module name -> how its heads are cut."""
    uncovered: tuple[str, ...] = ()
    """Parameters that no rule covers: every rank holds them whole."""
    notes: tuple[str, ...] = ()
    """What the user should know, worth a warning each."""

    def layout(self, name: str, shape: torch.Size, size: int) -> Layout:
        """Who holds what of the parameter `name`."""
        slicer = self.slicers.get(name)
        return slicer.layout(name.rpartition(".")[2], shape, size) if slicer is not None else Layout()


def resolve(plan: Plan, model: PreTrainedModel, size: int) -> Resolution:
    """Bind `plan` to the modules of `model` for `size` ranks.

    Args:
        plan: the plan.
        model: a transformers model; only names and shapes are looked at, so the meta device will do.
        size: number of ranks.

    Raises:
        PlanError: naming every rule that does not fit.
    """
    return _Resolver(plan, model, size).resolve()


class _Resolver:
    """The state of one `resolve`: what was matched, and what is wrong."""

    def __init__(self, plan: Plan, model: PreTrainedModel, size: int) -> None:
        self.plan, self.model, self.size = plan, model, size
        base_model = getattr(model, "base_model", model)
        self.prefix = "" if base_model is model else model.base_model_prefix
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.faults: list[str] = []

    def resolve(self) -> Resolution:
        """Match, bind, check; see the module's `resolve`."""
        self._check_architecture()
        module_rules = self._match(self.plan.rules, self.modules)
        param_rules = self._match(self.plan.rules, self.parameters)
        self._report_unmatched(module_rules, param_rules)
        if self.plan.declared:
            self._follow_tied(module_rules)
        cut = cut_attention(self.plan, self.model, module_rules, self.prefix, self.size, self.faults)
        layers = {name: self._bind(name, rule, cut) for name, rule in module_rules.items()}
        slicers: dict[str, TensorParallelLayer] = {}
        uncovered = []
        for name in self.parameters:
            owner = name.rpartition(".")[0]
            if name in param_rules:
                slicers[name] = self._bind(owner, param_rules[name], AttentionCut())
            elif owner in layers:
                slicers[name] = layers[owner]
            else:
                uncovered.append(name)
        self._check_param_rules(param_rules, module_rules)
        self._check_shapes(slicers)
        if self.faults:
            raise PlanError(
                fault_list(f"plan {self.plan.source} does not fit {type(self.model).__name__}", self.faults)
            )
        return Resolution(self.plan, layers, slicers, cut.heads, tuple(uncovered), self._notes(cut))

    def _check_architecture(self) -> None:
        model_type = self.model.config.model_type
        if self.plan.model_types and model_type not in self.plan.model_types:
            raise PlanError(
                f"plan {self.plan.source} is for {', '.join(self.plan.model_types)}, the model is a {model_type} "
                f'({type(self.model).__name__}). Pass tp_plan="auto", or a plan for {model_type}.'
            )

    def _match(self, rules: Iterable[Rule], names: Mapping[str, object]) -> dict[str, Rule]:
        matched: dict[str, Rule] = {}
        for rule in rules:
            for name in match(rule, names, self.prefix):
                if name in matched:
                    self.faults.append(f"{name}: two rules match it, {matched[name].pattern} and {rule.pattern}")
                matched[name] = rule
        return matched

    def _report_unmatched(self, *matched: Mapping[str, Rule]) -> None:
        used = {id(rule) for rules in matched for rule in rules.values()}
        known = {fold_layers(name) for name in (*self.modules, *self.parameters) if name}
        for rule in self.plan.rules:
            if id(rule) not in used and not rule.optional:
                pattern = full_pattern(rule, self.prefix)
                self.faults.append(f"{pattern}: matches no module or parameter{nearest(pattern, known)}")

    def _follow_tied(self, module_rules: dict[str, Rule]) -> None:
        """A declared plan may cut the head but not the embedding that is tied to it: cut both."""
        for target, source in _tied(self.model).items():
            owner, partner = source.rpartition(".")[0], target.rpartition(".")[0]
            if partner in module_rules and owner not in module_rules and isinstance(self.modules[owner], nn.Embedding):
                module_rules[owner] = Rule(owner, "embedding_rowwise")

    def _notes(self, cut: AttentionCut) -> tuple[str, ...]:
        if not cut.whole:
            return ()
        names = ", ".join(sorted(set(map(fold_layers, cut.whole.values()))))
        return (
            f"{names}: {self.size} ranks are more than the query heads, so every rank holds and computes all of them; "
            "the rest is still split",
        )

    def _bind(self, name: str, rule: Rule, cut: AttentionCut) -> TensorParallelLayer:
        """A copy of the rule's strategy for the module `name`."""
        layer, module = strategy_of(rule), self.modules[name]
        if name in cut.whole:
            return ReplicateParallel().bind(module, self.size)
        if rule.parts is not None and layer.parts is None:
            self.faults.append(f"{name}: {rule.strategy_name} takes no parts; use packed_colwise or packed_rowwise")
        return layer.bind(module, self.size, split=cut.splits.get(name), parts=rule.parts)

    def _check_param_rules(self, param_rules: Mapping[str, Rule], module_rules: Mapping[str, Rule]) -> None:
        """A linear or embedding that is cut has to communicate, so the rule has to name the module."""
        for name, rule in param_rules.items():
            owner = name.rpartition(".")[0]
            if isinstance(self.modules[owner], nn.Linear | nn.Embedding) and owner not in module_rules:
                self.faults.append(f"{name}: name the module, {fold_layers(owner)}: {rule.strategy_name}")

    def _check_shapes(self, slicers: Mapping[str, TensorParallelLayer]) -> None:
        """Every parameter can be cut as its strategy says, and tied parameters are cut alike."""
        layouts: dict[str, Layout] = {}
        for name, slicer in slicers.items():
            param = self.parameters[name]
            if isinstance(slicer, ColwiseParallel | RowwiseParallel) and not (
                slicer.is_embedding or param.ndim >= 2 or name.endswith(".bias")
            ):
                self.faults.append(f"{name}: {slicer!r} cuts linears and embeddings, its shape is {tuple(param.shape)}")
                continue
            try:
                layouts[name] = slicer.layout(name.rpartition(".")[2], param.shape, self.size)
            except ValueError as error:
                self.faults.append(f"{name}: {error}")
        for target, source in _tied(self.model).items():
            mine, theirs = layouts.get(target, Layout()), layouts.get(source, Layout())
            if self.size > 1 and mine != theirs:
                self.faults.append(
                    f"{target}: tied to {source}, but they are cut differently ({_draw(mine)} and {_draw(theirs)}); "
                    "cut both along the vocabulary (embedding_rowwise and colwise_rep) or neither"
                )


def _tied(model: PreTrainedModel) -> Mapping[str, str]:
    """{tied parameter: the parameter that it is tied to}."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def _draw(layout: Layout) -> str:
    return "whole" if layout.dim is None or layout.split is None else f"dim {layout.dim} into {layout.split.widths}"
