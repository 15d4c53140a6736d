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

from typing import TYPE_CHECKING

from torch import nn

from ...anatomy import DROPOUTS, fold_layers, is_inside, is_norm
from ...plans.rules import Plan
from .stack import StackRewriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
