"""Random numbers under tensor parallelism: shared for replicated activations, each rank's own for sharded ones.

All ranks start from one seed and draw the same numbers for replicated activations: dropouts on them have one mask.
Between a layer that outputs sharded features and the next that takes them, each rank has its own features or heads, and
their numbers may differ: there it draws from its own state, and the shared state advances equally on all ranks.

    replicated ── colwise ── [ own state: attention, activations ] ── rowwise ── replicated

The own state is a function of the shared state and of the rank. Nothing is kept between steps: where
torch.utils.checkpoint restores the shared state, the same masks are drawn again.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from copy import copy
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from ..anatomy import DROPOUTS
from ..marks import untyped
from ..strategies import TensorParallelLayer, block_of
from ..strategies.forward.block import Guard
from ..strategies.signature import FEATURES

_STEP = 0x9E3779B97F4A7C15
"""Difference between the seeds of neighbouring ranks: 2**64 divided by the golden ratio."""


class OwnRandomness(Guard):
    """Lets a rank draw its own numbers between the layers of one module."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.shared: Tensor | None = None
        """The shared state, while this rank draws from its own."""
        self.seed = 0
        """Seed of the own state. If the generator has another, the shared state is already back: torch.utils.checkpoint
        restores it when its recomputation ends before `module` does."""
        self.draws = False
        self.settings: Settings = ((), ())
        """Settings of the module, found once: torch before 2.12 does not compile the search for them."""
        self.hooked: WeakSet[nn.Module] = WeakSet()
        self.children: WeakSet[nn.Module] = WeakSet()
        """Current children of the module; an earlier child may now be inside an adapter."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnRandomness:
        copied = copy(self)
        copied.shared, copied.hooked, copied.children = None, WeakSet(), WeakSet()
        return copied

    def attach(self, module: nn.Module) -> None:
        """Draw from the own state between a column-parallel layer of `module` and the next row-parallel one.

        Without a row-parallel layer, or if a forward raises (recomputation stops by raising), up to the end of
        `module`.
        """
        self.settings = settings_of(module)
        block_of(module).guards.append(self)

    def begin(self, module: nn.Module) -> None:
        """Before the module: find out whether it drops anything, and hook the layers that it now consists of."""
        self.leave()
        self.draws = module.training and drops(module, self.settings)
        if not self.draws:
            return
        self.children = WeakSet(module.children())
        for child in module.children():
            if child not in self.hooked:
                self.hooked.add(child)
                self.hook(child, layer_strategy(child))

    def hook(self, child: nn.Module, strategy: TensorParallelLayer | None) -> None:
        """Switch states before or after the forward of a child of the module."""
        if strategy is None:
            return
        if strategy.signature.takes is FEATURES:
            child.register_forward_pre_hook(self.leave)
        elif strategy.signature.leaves is FEATURES:
            child.register_forward_hook(self.enter_after)
            if "tp_strategy" not in child.__dict__:  # an adapter, which may drop some of its replicated input
                child.register_forward_pre_hook(self.leave)

    def enter_after(self, child: nn.Module, *_: Any) -> None:
        """Switch to the own state, unless `child` is inside an adapter, which goes on with replicated activations."""
        if child in self.children:
            self.enter()

    def enter(self) -> None:
        """Switch to the own state; the shared state advances by one number on every rank."""
        if self.draws and not self._has_entered():
            seed, generator = next_seed(self.device), generator_of(self.device)
            self.shared = generator.get_state()
            self.seed = (seed + _STEP * (self.rank + 1)) % 2**63
            generator.manual_seed(self.seed)

    def leave(self, *_: Any) -> None:
        """Switch back to the shared state."""
        if self.shared is not None and self._has_entered():
            generator_of(self.device).set_state(self.shared)
        self.shared = None

    def _has_entered(self) -> bool:
        return self.shared is not None and generator_of(self.device).initial_seed() == self.seed


def layer_strategy(module: nn.Module) -> TensorParallelLayer | None:
    """The strategy of a layer; for an adapter such as LoRA, that of its base layer."""
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        module = untyped(module).base_layer
    return module.__dict__.get("tp_strategy")


Settings = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of the attributes of a module, and of its config, that may be a dropout probability."""


def settings_of(module: nn.Module) -> Settings:
    holders = (module, getattr(module, "config", None))
    own, of_config = (tuple(name for name in getattr(holder, "__dict__", ()) if "drop" in name) for holder in holders)
    return own, of_config


def drops(module: nn.Module, settings: Settings) -> bool:
    """True if a module drops anything itself: by its own setting, by one of its config, or by a dropout child."""
    config = getattr(module, "config", None)
    for holder, names in zip((module, config), settings, strict=True):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, float) and value > 0:
                return True
    return any(isinstance(child, DROPOUTS) and child.p > 0 for child in module.children())


def next_seed(device: torch.device) -> int:
    """Draw a number below 2**62 from the default generator of `device`.

    This does not synchronise with a GPU: there the number is a hash of the generator's state, which is on the host.
    """
    if device.type == "cpu":
        return int(torch.randint(2**62, (), device=device))
    state = generator_of(device).get_state()
    torch.rand((), device=device)
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest(), "little") >> 2


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of `device`; a GPU without an index is the current one, and has been used before."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device.type)
    generators: Sequence[torch.Generator] = module.default_generators
    return generators[module.current_device() if device.index is None else device.index]


def random_states(device: torch.device) -> tuple[Any, ...]:
    """The states of the default generators of Python, numpy, torch's CPU and `device`."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), generator_of(device).get_state()


def set_random_states(device: torch.device, states: tuple[Any, ...]) -> None:
    """Set the default generators to the states from `random_states`."""
    python, numpy, cpu, own = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    generator_of(device).set_state(own)
