"""Random numbers under tensor parallelism: the same where ranks hold the same activations, each rank's own where not.

All ranks begin with one seed, and draw alike where activations are whole: dropouts on them have one mask. Between a
layer that leaves its features sharded and the next that takes them so, each rank has features or heads of its own, in
numbers that may differ: there it draws from a state of its own, and the shared one goes on alike on all ranks.

    whole ── colwise ── [ own state: attention, activations ] ── rowwise ── whole

The own state is a function of the shared one and of the rank, and nothing is kept from step to step: where
torch.utils.checkpoint restores the shared state, the same masks are drawn again.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from .collectives import all_gather_uneven
from .mesh import TensorParallelGroup, random_state, set_random_state
from .strategies import TensorParallelLayer

_STEP = 0x9E3779B97F4A7C15
"""Between the seeds of neighbouring ranks: 2**64 by the golden ratio."""


class OwnRandomness:
    """Lets a rank draw numbers of its own between the layers of one module."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.shared: Tensor | None = None
        """The state that the ranks share, while this one draws from its own."""
        self.draws = False
        self.hooked: WeakSet[nn.Module] = WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnRandomness:
        return type(self)(self.rank, self.device)

    def attach(self, module: nn.Module) -> None:
        """Draw as this rank from the end of a column-parallel layer of `module` to the start of a row-parallel one.

        If there is none, or a forward raises, it is the end of `module` (recomputation stops by raising).
        """
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.leave, always_call=True)

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Before the module: find out whether it drops anything, and the layers that it is made of by now."""
        self.leave()
        self.draws = module.training and _drops(module)
        for child in module.children() if self.draws else ():
            strategy = _strategy(child)
            if child in self.hooked or strategy is None:
                continue
            self.hooked.add(child)
            if strategy.takes_sharded_input:
                child.register_forward_pre_hook(self.leave)
            elif strategy.leaves_sharded_output:
                child.register_forward_hook(self.enter)
                if "tp_strategy" not in child.__dict__:  # an adapter, which may drop some of its own, whole, input
                    child.register_forward_pre_hook(self.leave)

    def enter(self, *_: Any) -> None:
        """Draw as this rank alone; the shared state goes on by one number, on every rank."""
        if self.draws and self.shared is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
            self.shared = random_state(self.device)
            _seed(self.device, (seed + _STEP * (self.rank + 1)) % 2**63)

    def leave(self, *_: Any) -> None:
        """Draw as all ranks do."""
        if self.shared is not None:
            set_random_state(self.device, self.shared)
            self.shared = None


class SharedRandomness:
    """Lets the ranks draw alike in a module that computes on the samples of all, while each draws its own outside."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group
        self.own: Tensor | None = None
        """The state of this rank, while the ranks draw from a shared one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedRandomness:
        return type(self)(self.group)

    def attach(self, module: nn.Module) -> None:
        """Draw as all ranks do from the start of `module` to its end, however it ends."""
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.leave, always_call=True)

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Before the module: if it drops anything, take the first rank's next number for a seed (one all-gather)."""
        self.leave()
        if module.training and any(map(_drops, module.modules())):
            own = torch.randint(2**62, (1,), device="cpu").to(self.group.device)
            process_group = self.group.process_group
            assert process_group is not None
            seeds = all_gather_uneven(own, [1] * self.group.size, process_group, dim=0)
            self.own = random_state(self.group.device)
            _seed(self.group.device, int(seeds[0]))

    def leave(self, *_: Any) -> None:
        """Draw as this rank alone."""
        if self.own is not None:
            set_random_state(self.group.device, self.own)
            self.own = None


def _strategy(module: nn.Module) -> TensorParallelLayer | None:
    """The strategy of a layer, or of that which an adapter such as LoRA's is wrapped around."""
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        module = module.base_layer  # type: ignore[assignment]
    return module.__dict__.get("tp_strategy")


def _drops(module: nn.Module) -> bool:
    """Whether a module drops anything itself: by a setting of its own or of its config, or with a dropout in it."""
    config = getattr(module, "config", None)
    settings = {**(vars(config) if config is not None else {}), **vars(module)}
    by_setting = any("drop" in name and isinstance(value, float) and value > 0 for name, value in settings.items())
    return by_setting or any(isinstance(child, _DropoutNd) and child.p > 0 for child in module.children())


def _seed(device: torch.device, seed: int) -> None:
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)
