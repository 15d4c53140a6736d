"""Invariant plans: rewrites a plan so that results have the bits of one process, on any number of ranks.

No sum is split over the ranks; products gather their input, and each rank computes some of the output features:

    colwise, colwise_rep, packed_colwise    -> invariant_ and the name: the gradient of the input is computed by columns
    rowwise, rowwise_rep, packed_rowwise    -> invariant_ and the name: shards of output features
    embedding_rowwise                       -> invariant_embedding
    sharded_norm                            -> invariant_norm: computed from all features
    replicated_with_grad_allreduce          -> InvariantHeadNormParallel, for a norm within heads
    experts                                 -> invariant_experts: complete experts on each rank

Attention with fewer KV heads than ranks, with latents, or as a batch of products computes with all heads on every rank:
its projections stay sharded, and their outputs are gathered. See `_needs_all`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from ...anatomy import features, fold_layers, holds_experts, is_inside
from ...plans.attention import AttentionHeads
from ...plans.bind import bind
from ...plans.rule import Rule
from ...plans.rules import Plan
from ...strategies import TensorParallelLayer
from ...strategies.registry import built_in
from ..rewriting.rewriter import Rewriter
from .norms import InvariantHeadNormParallel

_INVARIANT = {
    "colwise": "invariant_colwise",
    "colwise_rep": "invariant_colwise_rep",
    "colwise_gather_output": "invariant_colwise_rep",
    "packed_colwise": "invariant_packed_colwise",
    "rowwise": "invariant_rowwise",
    "rowwise_rep": "invariant_rowwise_rep",
    "rowwise_split_input": "invariant_rowwise_rep",
    "packed_rowwise": "invariant_packed_rowwise",
    "embedding_rowwise": "invariant_embedding",
    "embedding_colwise": "embedding_colwise",
    "sharded_norm": "invariant_norm",
    "replicate": "replicate",
    "alibi": "alibi",
    "moe_tp_experts": "invariant_experts",
}
"""Strategy of a rule -> its strategy in an invariant plan."""
_OF_ALL_HEADS = {
    **dict.fromkeys(("colwise", "colwise_rep", "packed_colwise"), "invariant_colwise_rep"),
    **dict.fromkeys(("rowwise", "rowwise_rep", "packed_rowwise"), "invariant_rowwise_rep"),
    **dict.fromkeys(("sharded_norm", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_colwise"), "replicate"),
    **dict.fromkeys(("alibi", "replicate"), "replicate"),
}
"""The same in attention that computes with all heads on every rank."""


def make_invariant(plan: Plan, model: PreTrainedModel, size: int) -> Plan:
    """Rewrite `plan` so that its results do not depend on the number of ranks, `size`, with notes for the user.

    Raises PlanError with every rule that has no invariant form.
    """
    rewriter = _InvariantRewriter(plan, model, bind(plan, model, size).attention, size)
    names = ", ".join(sorted(set(map(fold_layers, rewriter.gathered))))
    note = f"{names}: its projections are sharded, and every rank computes all heads, so that no bits change"
    return replace(rewriter.rewrite(), notes=(*plan.notes, *([note] if names else [])))


class _InvariantRewriter(Rewriter):
    """State of one `make_invariant`."""

    form = "invariant"

    def __init__(self, plan: Plan, model: PreTrainedModel, attention: Mapping[str, AttentionHeads], size: int) -> None:
        super().__init__(plan, model)
        self.size = size
        self.attention = attention
        self.head_norms: dict[tuple[tuple[int, ...], ...], InvariantHeadNormParallel] = {}
        embeddings = [name for name, module in self.modules.items() if isinstance(module, nn.Embedding)]
        self.has_biases = any(is_inside(name, attending) for name in embeddings for attending in attention)
        self.gathered = [name for name, heads in attention.items() if self._needs_all(heads)]

    def rewrite_rules(self) -> None:
        for name, rule in list(self.rules.items()):
            strategy = self._strategy(name, rule)
            if strategy is None:
                self.faults.append(f"{fold_layers(name)}: {rule.strategy_name} has no invariant form")
            else:
                is_other_dim = strategy == "local" or self._attends(name)
                kept = replace(rule, parts=None, unit=None) if is_other_dim else rule
                self.rules[name] = replace(kept, strategy=strategy)
        for name, module in self.modules.items():
            if holds_experts(module) and any(is_inside(rule, name) for rule in self.rules):
                self._check_experts(name)

    def _strategy(self, name: str, rule: Rule) -> str | TensorParallelLayer | None:
        """The strategy in place of that of a rule; None if there is none, as for a user's own."""
        given, instance, module = rule.strategy_name, rule.instance, self.modules.get(name)
        if instance is not None and instance.keeps_order:
            return instance
        if instance is not built_in().get(given):
            return None
        if module is None and holds_experts(self.modules[name.rpartition(".")[0]]):
            return "local"
        if self._attends(name):
            return _OF_ALL_HEADS.get(given)
        if given == "replicated_with_grad_allreduce":
            return self._head_norm(name)
        if given == "local_colwise":  # an entry for each head, in a parameter or an embedding
            is_matrix = module is not None and features(module) is not None and not isinstance(module, nn.Embedding)
            return None if is_matrix else given
        return _INVARIANT.get(given)

    def _attends(self, name: str) -> bool:
        """True inside of attention that computes with all heads on every rank."""
        return any(is_inside(name, attention) for attention in self.gathered)

    def _needs_all(self, heads: AttentionHeads) -> bool:
        """True if attention computes with all heads on every rank.

        Eager attention multiplies the heads of all samples as one batch, whose kernel depends on their number where
        there are few tokens. So does torch's, if a mask requires a gradient, such as a learned bias of positions.
        """
        eager = getattr(self.model.config, "_attn_implementation", None) == "eager"
        return heads.kv.length < self.size or heads.is_latent or eager or self.has_biases

    def _head_norm(self, name: str) -> TensorParallelLayer | None:
        """The strategy of a norm within the heads of the attention around it, one for equal heads; None outside."""
        for attention, heads in self.attention.items():
            if is_inside(name, attention):
                counts = heads.query.widths, heads.kv.widths
                return self.head_norms.setdefault(counts, InvariantHeadNormParallel(counts))
        return None

    def _check_experts(self, name: str) -> None:
        count = next((param.shape[0] for param in self.modules[name].parameters() if param.ndim == 3), 0)
        if count < self.size:
            self.faults.append(f"{fold_layers(name)}: {count} experts are fewer than {self.size} ranks")
        own = self.rules.get(name)
        if own is None or own.instance is None or not own.instance.keeps_order:
            self.faults.append(f"{fold_layers(name)}: its experts have no rule moe_tp_experts")
