"""Loss parallelism: rewrites a plan to keep logits sharded along the vocabulary.

It takes a language model with an output embedding that is sharded along the vocabulary:

    lm_head                         colwise_rep         -> colwise_loss
    the model                                           -> loss_parallel
"""

from __future__ import annotations

from dataclasses import replace
from inspect import unwrap

from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ...anatomy import base_prefix
from ...errors import PlanError
from ...plans.rule import Rule
from ...plans.rules import Plan


def shard_loss(plan: Plan, model: PreTrainedModel) -> Plan:
    """Rewrite `plan` to keep the logits of `model` sharded when it is given labels.

    Raises PlanError if the output embedding is not column-parallel, or the loss is not ForCausalLMLoss.
    """
    heads = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    rules = [rule for rule in plan.rules for _ in rule.match(heads, base_prefix(model))]
    loss = model.loss_function if "loss_function" in unwrap(type(model).forward).__code__.co_names else None
    if [rule.strategy for rule in rules] not in (
        ["colwise_rep"],
        ["colwise_gather_output"],
    ) or loss is not ForCausalLMLoss:
        described = [f"{rule.full(base_prefix(model))}: {rule.strategy_name}" for rule in rules] or ["no rule for one"]
        raise PlanError(
            f"plan {plan.source} with loss_parallel",
            got=f"{type(model).__name__}, {described[0]}, {'another' if loss is not ForCausalLMLoss else 'its'} loss",
            expected="a language model with an output embedding that is colwise_rep, and ForCausalLMLoss",
            fix="Load it without tp_loss_parallel, or use vocab_parallel_cross_entropy.",
        )
    other_rules = [rule for rule in plan.rules if rule is not rules[0]]
    loss_rules = [replace(rules[0], strategy="colwise_loss"), Rule("", "loss_parallel")]
    return replace(plan, rules=(*other_rules, *loss_rules))
