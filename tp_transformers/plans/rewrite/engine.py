"""A plan of tensor parallelism -> the same plan with one of its options: sequence or loss parallelism, or batches of
each rank's own.

Sequence parallelism (Korthikanti et al. 2022) takes a decoder: a base model with one stack of layers and a norm after
it, whose layers are made up of norms and of blocks that give back what they take, summed with it. Layers do not say so;
their modules and rules do, or the plan is refused:

    layers.0                        sequence_scatter
    layers.*.<norm>                 replicate           -> sequence_parallel
    layers.*.<block>                                    -> sequence_gather, around rules that compute locally
      colwise, rowwise                                  -> local_colwise, local_rowwise
    layers.*.<any other block>                          -> sequence_whole, around the same rules (mixtures of experts)
    <norm after the layers>         replicate           -> sequence_parallel_rep
    the base model                                      -> sequence_states

Loss parallelism takes a language model with an output embedding that is cut along the vocabulary:

    lm_head                         colwise_rep         -> colwise_loss
    the model                                           -> loss_parallel

Where ranks have batches of their own, only chosen modules are cut:

    <chosen block>                                      -> gathers samples, around rules as in sequence parallelism
    <chosen head or embedding>      colwise_rep, ...    -> the same on the samples of all ranks
    everything else                 any                 -> replicate
    the base model                                      -> agrees on the numbers of samples
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import signature, unwrap
from typing import TYPE_CHECKING

from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ...anatomy.linears import features, holds_experts
from ...anatomy.names import base_prefix, fold_layers, folded
from ...anatomy.norms import is_norm_of_tokens
from ...errors import PlanError, describe, list_faults, nearest
from ...strategies import BATCH_SHARDED, BatchGather, BatchStates, BatchWhole, TensorParallelLayer
from ..rules import Pattern, Plan, Rule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOCAL = {
    "colwise": "local_colwise",
    "rowwise": "local_rowwise",
    "packed_colwise": "local_packed_colwise",
    "packed_rowwise": "local_packed_rowwise",
}
"""What a rule becomes where the block around it communicates."""
_LOCAL_ALREADY = {*_LOCAL.values(), "replicated_with_grad_allreduce", "sharded_norm"}
"""Rules that stay in such a block."""
_WHOLE = ("replicate", "sequence_parallel")
"""Rules of norms."""


def cut_sequence(plan: Plan, model: PreTrainedModel) -> Plan:
    """`plan` with activations cut along the sequence between the blocks of `model`, whose names it is given in.

    Raises PlanError, naming everything that it cannot tell the meaning of, where the model is no such decoder.
    """
    return _Rewriter(plan, model).rewrite()


def cut_loss(plan: Plan, model: PreTrainedModel) -> Plan:
    """`plan` with the logits of `model` left cut where it is given labels.

    Raises PlanError where the model has no output embedding that is cut, or no loss over its vocabulary.
    """
    heads = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    rules = [rule for rule in plan.rules for _ in rule.match(heads, base_prefix(model))]
    loss = model.loss_function if "loss_function" in unwrap(type(model).forward).__code__.co_names else None
    if [rule.strategy for rule in rules] not in (
        ["colwise_rep"],
        ["colwise_gather_output"],
    ) or loss is not ForCausalLMLoss:
        found = [f"{rule.full(base_prefix(model))}: {rule.strategy_name}" for rule in rules] or ["no rule for one"]
        raise PlanError(
            describe(
                f"plan {plan.source} with loss_parallel",
                got=f"{type(model).__name__}, {found[0]}, {'another' if loss is not ForCausalLMLoss else 'its'} loss",
                expected="a language model with an output embedding that is colwise_rep, and ForCausalLMLoss",
                fix="Load it without tp_loss_parallel, or use vocab_parallel_cross_entropy.",
            )
        )
    others = [rule for rule in plan.rules if rule is not rules[0]]
    own = [replace(rules[0], strategy="colwise_loss"), Rule("", "loss_parallel")]
    return replace(plan, rules=(*others, *own), loss_parallel=False)


def cut_batch(plan: Plan, model: PreTrainedModel) -> Plan:
    """`plan` with modules that gather the samples of ranks, which have batches of their own; itself if it says of none.

    Raises PlanError, naming everything that it cannot tell the meaning of, also beside another option.
    """
    if not (plan.batch_sharded or any(rule.batch_sharded for rule in plan.rules)):
        return plan
    if plan.batch_sharded is False:
        return replace(plan, rules=tuple(replace(rule, batch_sharded=False) for rule in plan.rules))
    others = [option for option in ("sequence_parallel", "loss_parallel") if getattr(plan, option)]
    if others:
        raise PlanError(
            describe(
                f"plan {plan.source}",
                got=f"batch_sharded and {' and '.join(others)}",
                expected="one of them",
                fix=f"Leave out {' and '.join(others)}: norms and losses are of a rank's own samples already.",
            )
        )
    return _BatchRewriter(plan, model).rewrite()


class _Rewriter:
    """The state of one rewriting: the rules by the names that they match, and what is wrong."""

    form = "sequence-parallel"
    gather: str | TensorParallelLayer = "sequence_gather"
    whole: str | TensorParallelLayer = "sequence_whole"
    """What stands around blocks that compute locally, and around others."""
    unfit = "it is neither a norm nor a block that cuts and sums features"

    def __init__(self, plan: Plan, model: PreTrainedModel) -> None:
        self.plan, self.model, self.prefix = plan, model, base_prefix(model)
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.names = [*self.modules, *dict(model.named_parameters(remove_duplicate=False))]
        self.rules = {name: rule for rule in plan.rules for name in rule.match(self.names, self.prefix)}
        self.faults: list[str] = []

    def rewrite(self) -> Plan:
        """The plan, rewritten; raises PlanError with all that is wrong."""
        counts = Counter(name for rule in self.plan.rules for name in rule.match(self.names, self.prefix))
        done = replace(self.plan, sequence_parallel=False, batch_sharded=None)
        if any(rule.instance is None for rule in self.plan.rules) or any(count > 1 for count in counts.values()):
            return done  # a plan with such faults is refused as it is
        stack = self._stack()
        if getattr(self.model.config, "is_encoder_decoder", False):
            self.faults.append("it has an encoder and a decoder")
        if stack is not None:
            self._rewrite_around(stack)
        if self.faults:
            title = f"plan {self.plan.source} cannot be made {self.form} for {type(self.model).__name__}"
            raise PlanError(list_faults(title, self.faults))
        matched = {id(rule) for rule in self.plan.rules if any(rule.match(self.names, self.prefix))}
        others = tuple(rule for rule in self.plan.rules if id(rule) not in matched)
        return replace(done, rules=(*self._folded(), *others))

    def _rewrite_around(self, stack: str) -> None:
        """The layers of `stack`, and what is before and after them."""
        for index, layer in self.modules[stack].named_children():
            self._rewrite_layer(f"{stack}.{index}", layer)
        self._rewrite_end(self.modules[self.prefix], stack)
        self._set(f"{stack}.0", "sequence_scatter")
        self._set(self.prefix, "sequence_states")

    def _stack(self) -> str | None:
        """The one list of modules that rules cut; the one that there is, where they cut none."""
        lists = [name for name, module in self.modules.items() if isinstance(module, nn.ModuleList)]
        cut = [name for name in lists if any(_inside(rule, name) for rule in self.rules)] or lists
        outermost = [name for name in cut if not any(_inside(name, other) for other in cut if other != name)]
        if len(outermost) == 1 and outermost[0].rpartition(".")[0] == self.prefix:
            return outermost[0]
        self.faults.append(f"it has {', '.join(outermost) or 'nothing'} where the base model's one stack of layers is")
        return None

    def _rewrite_layer(self, name: str, layer: nn.Module) -> None:
        if any(True for _ in layer.parameters(recurse=False)):
            self.faults.append(f"{fold_layers(name)}: it has parameters of its own")
        for child, module in layer.named_children():
            path = f"{name}.{child}"
            if self._is_norm(path, module):
                self._set(path, "sequence_parallel")
            elif any(True for _ in module.parameters()):
                self._rewrite_block(path, module)

    def _rewrite_block(self, name: str, block: nn.Module) -> None:
        inner = {rule: self.rules[rule] for rule in self.rules if _inside(rule, name)}
        own = self.rules.get(name)
        makes = [rule for rule in inner.values() if rule.instance and rule.instance.leaves_sharded_output]
        sums = [rule for rule in inner.values() if rule.instance and rule.instance.takes_sharded_input]
        if features(block) is not None or not (makes and sums):
            self.faults.append(f"{fold_layers(name)}: {self.unfit}")
        elif own is not None and own.strategy not in ("gather", "replicate"):
            self.faults.append(f"{fold_layers(name)}: {own.strategy_name} is a rule for the block itself")
        elif "residual" in signature(type(block).forward).parameters:
            self.faults.append(f"{fold_layers(name)}: it adds a residual that it is given")
        elif self._is_local(name, block, inner):
            for path, rule in inner.items():
                self.rules[path] = replace(rule, strategy=_LOCAL.get(str(rule.strategy), rule.strategy))
            self._set(name, self.gather)
        elif own is not None and own.strategy == "gather":
            self.faults.append(f"{fold_layers(name)}: gather stands around rules that do not all compute locally")
        else:
            self._set(name, self.whole)

    def _is_local(self, name: str, block: nn.Module, inner: Mapping[str, Rule]) -> bool:
        """Whether all that the block has of parameters can compute locally, and give a part of a sum.

        It may drop some of its output: all ranks drop the same of their parts of the sum.
        """
        parameters = {f"{name}.{param}" for param, _ in block.named_parameters()}
        ruled = {param for param in parameters if param in inner or param.rpartition(".")[0] in inner}
        return ruled == parameters and all(rule.strategy in {*_LOCAL, *_LOCAL_ALREADY} for rule in inner.values())

    def _rewrite_end(self, base: nn.Module, stack: str) -> None:
        """The norm after the layers gives back the whole."""
        children = {f"{self.prefix}.{child}".lstrip("."): module for child, module in base.named_children()}
        after = list(children)[list(children).index(stack) + 1 :]
        norms = [name for name in after if self._is_norm(name, children[name])]
        ends = norms + [name for name in after if name not in norms and any(True for _ in children[name].parameters())]
        if norms and len(ends) == 1:
            self._set(ends[0], "sequence_parallel_rep")
        else:
            self.faults.append(f"it has {', '.join(ends) or 'nothing'} after {stack}, where one norm is")

    def _is_norm(self, name: str, module: nn.Module) -> bool:
        """Whether a module computes token by token: only vectors, which no rule cuts."""
        own = [rule.strategy for path, rule in self.rules.items() if path == name or _inside(path, name)]
        return is_norm_of_tokens(module) and set(own) <= set(_WHOLE)

    def _set(self, name: str, strategy: str | TensorParallelLayer) -> None:
        if strategy in ("sequence_parallel", "sequence_parallel_rep"):  # for all that the norm has
            self.rules = {path: rule for path, rule in self.rules.items() if not _inside(path, name)}
        self.rules[name] = Rule(name, strategy)

    def _folded(self) -> Iterator[Rule]:
        """The rules, one for all layers where those of all layers are alike."""
        plain = ((name, replace(rule, pattern="", in_base_model=False)) for name, rule in self.rules.items())
        for pattern, found in folded(plain).items():
            names = {name for alike in found.values() for name in alike}
            if len(found) == 1 and set(Pattern(pattern).match(self.names, "")) == names:
                yield replace(next(iter(found)), pattern=pattern)
            else:
                own = (name for name in self.rules if name in names)
                yield from (replace(self.rules[name], pattern=name, in_base_model=False) for name in own)


class _BatchRewriter(_Rewriter):
    """The state of one `cut_batch`."""

    form = "batch-sharded"
    gather = BatchGather()
    whole = BatchWhole()
    unfit = f"no rules in it cut features and sum them, and its own is none of {', '.join(BATCH_SHARDED)}"

    def _rewrite_around(self, stack: str) -> None:
        chosen = dict.fromkeys((*self._chosen(), *(self._all(stack) if self.plan.batch_sharded is True else ())))
        inner = [name for name in chosen if any(_inside(name, other) for other in chosen)]
        for name in inner:
            self.faults.append(f"{fold_layers(name)}: it stands in another module whose input is batch-sharded")
        for name in (name for name in chosen if name not in inner):
            rule = self.rules.get(name)
            strategy = BATCH_SHARDED.get(rule.strategy_name) if rule is not None else None
            if strategy is not None and rule is not None:
                self.rules[name] = replace(rule, strategy=strategy)
            else:
                self._rewrite_block(name, self.modules[name])
        for name in list(self.rules):
            if not any(name == other or _inside(name, other) for other in chosen):
                self.rules[name] = Rule(name, "replicate")
        self.rules = {name: replace(rule, batch_sharded=False) for name, rule in self.rules.items()}
        self.rules[self.prefix] = Rule(self.prefix, _STATES)
        if not (chosen or self.faults):
            self.faults.append("it has no attention, MLP or experts that rules cut")

    def _chosen(self) -> Iterator[str]:
        """Modules that are named, or whose rules say so."""
        named = self.plan.batch_sharded if isinstance(self.plan.batch_sharded, tuple) else ()
        patterns = [Pattern(name) for name in named] + [rule for rule in self.plan.rules if rule.batch_sharded]
        for pattern in patterns:
            names = list(pattern.match(self.modules, self.prefix))
            if not names and not (isinstance(pattern, Rule) and pattern.optional):
                full = pattern.full(self.prefix)
                known = {fold_layers(name) for name in self.modules if name}
                self.faults.append(f"{full}: matches no module{nearest(full, known)}")
            yield from names

    def _all(self, stack: str) -> Iterator[str]:
        """The blocks of every layer that rules cut."""
        for name in self.modules:
            if name.rpartition(".")[0].rpartition(".")[0] == stack:
                inner = [rule.instance for path, rule in self.rules.items() if _inside(path, name)]
                if any(rule and rule.leaves_sharded_output for rule in inner):
                    yield name

    def _is_local(self, name: str, block: nn.Module, inner: Mapping[str, Rule]) -> bool:
        """As ever, but not where a router's logits are a part of a rank's own loss."""
        return super()._is_local(name, block, inner) and not any(map(holds_experts, block.modules()))


_STATES = BatchStates()


def _inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")
