"""A plan while it is bound to a model: what its rules match, the strategies and layouts that follow, and the faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from ..anatomy import base_prefix, features
from ..slices.layout import Layout, Split
from ..strategies import TensorParallelLayer
from ..strategies.signature import PARTIAL, Signature
from .attention import AttentionHeads
from .rule import UNRULED, Rule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .rules import Plan


class Binding:
    """The state of a plan that is bound to `model` on `size` ranks: `bind.py` fills it, checks read it."""

    def __init__(self, plan: Plan, model: PreTrainedModel, size: int) -> None:
        """Raises PlanError if the plan has shares for another number of ranks."""
        self.plan, self.model, self.prefix = plan, model, base_prefix(model)
        self.size, self.ranks = size, plan.ranks(size)
        self.modules: Mapping[str, nn.Module] = dict(model.named_modules())
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        self.module_rules: dict[str, Rule] = {}
        self.param_rules: dict[str, Rule] = {}
        """Parameter -> the rule that names it."""
        self.attention: Mapping[str, AttentionHeads] = {}
        self.splits: dict[str, Split] = {}
        """Projection, parameter or attention module -> split of its heads or features."""
        self.replicated: dict[str, str] = {}
        """Child that is replicated because there are more ranks than heads -> the module whose heads they are."""
        self.module_strategies: dict[str, TensorParallelLayer] = {}
        self.param_strategies: dict[str, TensorParallelLayer] = {}
        self.layouts: dict[str, Layout | None] = {}
        self.faults: list[str] = []
        self.notes: list[str] = []

    def strategy(self, module: str) -> TensorParallelLayer:
        return self.module_strategies.get(module, UNRULED)

    def signature(self, module: str) -> Signature:
        return self.strategy(module).signature

    def has_whole_gradient(self, param: str) -> bool:
        """True for a replicated parameter whose gradient is not summed over the ranks."""
        is_summed = self.param_strategies.get(param, UNRULED).signature.gradient is PARTIAL
        return self.layouts.get(param) is None and not is_summed

    def own_layouts(self, owner: str) -> dict[str, Layout | None]:
        """The layouts of a module's own parameters."""
        own = self.modules[owner].named_parameters(recurse=False)
        return {name: self.layouts.get(f"{owner}.{name}".lstrip(".")) for name, _ in own}

    def children(self, block: str) -> dict[str, nn.Module]:
        """Children of a module, by their names in the model."""
        return {f"{block}.{name}".lstrip("."): child for name, child in self.modules[block].named_children()}

    def sums(self) -> set[str]:
        """Blocks that sum their output over the ranks."""
        return summing_blocks(self.module_strategies, self.modules)


def summing_blocks(strategies: Mapping[str, TensorParallelLayer], modules: Mapping[str, nn.Module]) -> set[str]:
    """Blocks that sum their output over the ranks; linears, which sum their own output, are excluded."""
    return {
        name for name, strategy in strategies.items() if strategy.signature.sums and features(modules[name]) is None
    }
