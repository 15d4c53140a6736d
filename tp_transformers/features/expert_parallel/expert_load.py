"""Tokens of each expert and of each rank in training: how evenly routers use a mixture of experts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...marks import Mark, untyped
from ...patches import Patch, nothing, replace
from ...ranks.group import GROUP
from ...slices.layout import Split
from ...strategies import STRATEGY
from ..sequence.region import in_backward
from ..sequence.signatures import exchanges_tokens
from .exchange import takes_expert_ids


@dataclass(frozen=True)
class LayerLoad:
    """Load of the experts of one layer, in pairs of a token and one of its experts."""

    experts: tuple[int, ...]
    """Pairs of each expert, over the batches of all ranks."""
    ranks: tuple[int, ...] = ()
    """Pairs that each rank computes; empty if each expert is sharded, and all ranks compute all pairs."""

    @property
    def imbalance(self) -> float:
        """The largest load of a rank, or else of an expert, relative to the mean; 1 if all are equal."""
        loads = self.ranks or self.experts
        return max(loads) * len(loads) / max(sum(loads), 1)


class ExpertLoad:
    """Counts the tokens that routers send to each expert, in forwards of `model` in training.

    Trainer adds the imbalance of the layers since the last log to its log. In a loop of your own:

        load = tp_transformers.training.ExpertLoad(model)
        ...
        for name, layer in load.read().items():
            print(name, layer.experts, layer.ranks, layer.imbalance)
    """

    def __init__(self, model: nn.Module) -> None:
        """`model`: a mixture of experts, loaded with a plan or without one. Raises ValueError if it has no experts that
        are called with expert ids."""
        self.model = model
        self.modules = {name: module for name, module in model.named_modules() if takes_expert_ids(module)}
        if not self.modules:
            raise ValueError(f"{type(model).__name__} has no experts that are called with the ids of their experts")
        self.counts: dict[str, Tensor] = {}
        self.handles = [
            module.register_forward_pre_hook(self._counting(name), with_kwargs=True)
            for name, module in self.modules.items()
        ]
        EXPERT_LOAD.put(model, self)
        LOGGED.hold_for(model)

    def read(self) -> dict[str, LayerLoad]:
        """The loads by the names of the modules, since the last call. Collective over the ranks of all copies."""
        counts, self.counts = self.counts, {}
        found = {}
        group = GROUP.find(self.model)
        for name, module in self.modules.items():
            strategy, split = STRATEGY.find(module), _split(module)
            total = counts.get(name)
            if total is None:
                total = torch.zeros(_expert_count(module), dtype=torch.long)
            if group is not None and group.mesh is not None:
                exchanges = strategy is not None and exchanges_tokens(strategy.signature)
                if group.rank and not exchanges:  # it has the tokens of rank 0
                    total = torch.zeros_like(total)
                total = total.to(group.device)
                for process_group in group.mesh.get_all_groups():
                    dist.all_reduce(total, group=process_group)
            experts = tuple(total.tolist())
            ranges = () if split is None else split.ranges
            by_rank = (sum(sum(experts[start:stop]) for start, stop in own) for own in ranges)
            found[name] = LayerLoad(experts, tuple(by_rank))
        return found

    def log(self) -> dict[str, float]:
        """Numbers for the log of a trainer: the largest and the mean imbalance of all layers. Collective."""
        values = [layer.imbalance for layer in self.read().values() if sum(layer.experts)]
        if not values:
            return {}
        return {"expert_imbalance_max": max(values), "expert_imbalance": sum(values) / len(values)}

    def remove(self) -> None:
        """Count no longer."""
        for handle in self.handles:
            handle.remove()
        EXPERT_LOAD.put(self.model, None)

    def _counting(self, name: str) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
            is_repeated = in_backward() >= 0  # by gradient checkpointing
            is_copied = module is not self.modules[name]  # a deep copy of a model has its hooks, too
            if is_repeated or is_copied or not module.training or not torch.is_grad_enabled():
                return
            ids = args[1] if len(args) > 1 else keywords[[*inspect.signature(type(module).forward).parameters][2]]
            seen = torch.bincount(ids.detach().flatten().long(), minlength=_expert_count(module))
            before = self.counts.get(name)
            self.counts[name] = seen if before is None else before + seen

        return torch.compiler.disable(count)


EXPERT_LOAD: Mark[ExpertLoad | None] = Mark("tp_expert_load")
"""The counter of a model."""


def _log(original: Any, self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
    """See `transformers.Trainer`; adds the balance of experts that an `ExpertLoad` counts."""
    load = EXPERT_LOAD.find(self.model) if "loss" in logs else None
    original(self, logs if load is None else {**logs, **load.log()}, *args, **kwargs)


LOGGED = Patch(
    "transformers",
    "Trainer.log",
    lambda: replace(untyped(sys.modules["transformers.trainer"]).Trainer, "log", _log),
    module="transformers.trainer",
    without=nothing,
)
"""Held by every model whose experts are counted."""


def _split(module: nn.Module) -> Split | None:
    """The split of complete experts over the ranks."""
    return getattr(STRATEGY.find(module), "experts", None)


def _expert_count(module: nn.Module) -> int:
    """Number of all experts of a module."""
    split = _split(module)
    return split.length if split is not None else next(len(p) for p in module.parameters() if p.ndim == 3)
