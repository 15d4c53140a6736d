"""A module without a strategy in the place of a sharded one: its forward raises.

Its inputs or outputs would have all features where its neighbours have this rank's. Shapes do not always show it: an
`nn.Linear` in k_proj's place makes more KV heads than the rank has, and attention shares them out to other query heads.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import UnsupportedError
from ...patches import Patch
from ...ranks.group import agreed
from ...strategies import STRATEGY
from ...strategies.signature import FEATURES


class _Unsharded:
    """A forward pre-hook of the module that replaced the child `name` of `outer`."""

    def __init__(self, outer: nn.Module, name: str) -> None:
        self.outer, self.name = outer, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raise UnsupportedError while modules beside it are sharded, unless it has been sharded since."""
        if not _is_sharded(module) and any(_splits_features(child) for child in self.outer.children()):
            raise agreed(
                UnsupportedError(
                    f"{type(self.outer).__name__}.{self.name}",
                    got=f"a {type(module).__name__} in the place of a module that is sharded over the ranks",
                    expected="a module that is sharded like it, or that calls it",
                    fix="Replace it in the checkpoint's model, before from_pretrained shards it. Or shard the new "
                    "module: torch's parallelize_module takes tp_transformers.strategies.STRATEGIES[...].",
                )
            )


def _registered(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Handle `inner` becoming the child `name` of `outer`; torch calls this for every registered module."""
    former = outer._modules.get(name)
    if _splits_features(former) and inner is not None and not _is_sharded(inner):
        inner.register_forward_pre_hook(_Unsharded(outer, name))


def _splits_features(module: nn.Module | None) -> bool:
    """True if the inputs or outputs of `module` are this rank's shard of the features; an embedding takes ids."""
    if (strategy := STRATEGY.find(module)) is None or strategy.size == 1 or strategy.is_embedding:
        return False
    return FEATURES in (strategy.signature.takes, strategy.signature.leaves)


def _is_sharded(module: nn.Module) -> bool:
    """True if `module`, or one that it calls, has a strategy or parameters that are DTensors."""
    return any(STRATEGY.find(inner) for inner in module.modules()) or any(
        isinstance(param, DTensor) for param in module.parameters()
    )


UNSHARDED_MODULES_RAISE = Patch(
    "torch",
    "module registration hook of replaced modules",
    lambda: nn.modules.module.register_module_module_registration_hook(_registered).remove,
)
"""Makes a module that replaces a sharded one raise in its forward, on all ranks, unless it is sharded too."""
