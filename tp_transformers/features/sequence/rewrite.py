"""Sequence parallelism: rewrites a plan to shard activations along the sequence between blocks.

Sequence parallelism (Korthikanti et al. 2022) takes a decoder: a base model with one stack of layers and a norm after
it. A layer consists of norms and of blocks with outputs that are added to the residual stream. They are recognised by
their modules and rules; PlanError is raised for other modules:

    layers.0                        sequence_scatter
    layers.*.<norm>                 replicate           -> sequence_parallel
    layers.*.<block>                                    -> sequence_gather, around rules that compute locally
      colwise, rowwise                                  -> local_colwise, local_rowwise
    layers.*.<block with such experts>  moe_all_to_all  -> its router: sequence_parallel; its blocks: sequence_gather
    layers.*.<any other block>                          -> sequence_whole, around the same rules (mixtures of experts)
    <norm after the layers>         replicate           -> sequence_parallel_rep
    the base model                                      -> sequence_states
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature

from torch import nn
from transformers import PreTrainedModel

from ...anatomy import DROPOUTS, features, fold_layers, is_inside, is_norm, stacks
from ...plans.rule import Rule
from ...plans.rules import Plan
from ...strategies import TensorParallelLayer
from ...strategies.signature import FEATURES
from ..rewriting.rewriter import Rewriter
from .signatures import exchanges_tokens

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
        return [path for path, strategy in rules if strategy is not None and exchanges_tokens(strategy.signature)]

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


def shard_sequence(plan: Plan, model: PreTrainedModel) -> Plan:
    """Rewrite `plan` to shard activations along the sequence between the blocks of `model`.

    Raises PlanError, with every module that is not recognised, if the model is not such a decoder.
    """
    return _SequenceRewriter(plan, model).rewrite()


class _SequenceRewriter(StackRewriter):
    """State of one `shard_sequence`."""

    form = "sequence-parallel"
    gather = "sequence_gather"
    full = "sequence_whole"
    unfit = "it is neither a norm nor a block that shards and sums features"

    def rewrite_around(self, stack: str) -> None:
        """Rewrite the layers of `stack`, and the modules before and after them."""
        for index, layer in self.modules[stack].named_children():
            self._rewrite_layer(f"{stack}.{index}", layer)
        self._rewrite_end(self.modules[self.prefix], stack)
        self.set(f"{stack}.0", "sequence_scatter")
        self.set(self.prefix, "sequence_states")

    def _rewrite_layer(self, name: str, layer: nn.Module) -> None:
        if any(True for _ in layer.parameters(recurse=False)):
            self.faults.append(f"{fold_layers(name)}: it has parameters of its own")
        for child, module in layer.named_children():
            path = f"{name}.{child}"
            if self._is_norm(path, module):
                self._set_norm(path, "sequence_parallel")
            elif self.exchanging(path):
                self._rewrite_mixture(path, module)
            elif any(True for _ in module.parameters()):
                self.rewrite_block(path, module)

    def _rewrite_mixture(self, name: str, block: nn.Module) -> None:
        """Let a block with experts that exchange tokens compute on shards of the sequence; rewrite its inner blocks."""
        if any(True for _ in block.parameters(recurse=False)):
            self.faults.append(f"{fold_layers(name)}: it has experts that exchange tokens, and parameters of its own")
        if any(map(_draws, block.modules())):
            self.faults.append(
                f"{fold_layers(name)}: it draws random numbers for tokens, which are on different ranks; set its "
                "jitter and dropout to 0 in the config, or use moe_tp_experts"
            )
        for child, module in block.named_children():
            path = f"{name}.{child}"
            if self.exchanging(path):
                if self.exchanging(path) != [path]:
                    self.faults.append(f"{fold_layers(path)}: experts in it exchange tokens; they have to be its own")
            elif self.shards_features(path) or any(param.ndim > 2 for param in module.parameters()):
                self.rewrite_block(path, module)
            else:  # a router, or another token-wise module
                for inner, submodule in module.named_modules(prefix=path):
                    if any(True for _ in submodule.parameters(recurse=False)):
                        self._set_norm(inner, "sequence_parallel")

    def _rewrite_end(self, base: nn.Module, stack: str) -> None:
        """Let the norm after the layers return the full sequence."""
        children = {f"{self.prefix}.{child}".lstrip("."): module for child, module in base.named_children()}
        after = list(children)[list(children).index(stack) + 1 :]
        norms = [name for name in after if self._is_norm(name, children[name])]
        ends = norms + [name for name in after if name not in norms and any(True for _ in children[name].parameters())]
        if norms and len(ends) == 1:
            self._set_norm(ends[0], "sequence_parallel_rep")
        else:
            self.faults.append(f"it has {', '.join(ends) or 'nothing'} after {stack}, where one norm is")

    def _is_norm(self, name: str, module: nn.Module) -> bool:
        """True for a norm of single tokens: it has only vectors, and no rule shards them."""
        own = [rule.strategy for path, rule in self.rules.items() if path == name or is_inside(path, name)]
        return is_norm_of_tokens(module) and set(own) <= {"replicate", "sequence_parallel"}

    def _set_norm(self, name: str, strategy: str) -> None:
        """Set the rule of a norm, and remove rules inside it."""
        self.rules = {path: rule for path, rule in self.rules.items() if not is_inside(path, name)}
        self.set(name, strategy)


def _draws(module: nn.Module) -> bool:
    """True if a module draws random numbers per token in training: a dropout, or a router with noise."""
    noise = (value for name, value in vars(module).items() if "jitter" in name)
    return (isinstance(module, DROPOUTS) and module.p > 0) or any(isinstance(n, float) and n > 0 for n in noise)


def is_norm_of_tokens(module: nn.Module) -> bool:
    """True for a token-wise norm (all parameters are vectors), which can run on a shard of the sequence."""
    return is_norm(module) and all(param.ndim == 1 for param in module.parameters())
