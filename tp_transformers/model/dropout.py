"""Random numbers under tensor parallelism: shared for replicated activations, each rank's own for sharded ones.

All ranks start from one seed and draw the same numbers for replicated activations: dropouts on them have one mask.
Between a layer that outputs sharded features and the next that takes them, each rank has its own features or heads, and
their numbers may differ: there it draws from its own state, and the shared state advances equally on all ranks.

    replicated ── colwise ── [ own state: attention, activations ] ── rowwise ── replicated

Under sequence parallelism each rank has its own tokens outside of the blocks, which gather the sequence:

    shard ── norm ── block ── [ own state: dropout, sum, norm ] ── block ── [ own state: dropout, sum ] ── shard

The own state is a function of the shared state and of the rank. Nothing is kept between steps: where
torch.utils.checkpoint restores the shared state, the same masks are drawn again.

Results with the bits of one process need its masks: there a rank draws those of all heads and features from the shared
state, and uses its shard (`FullMasks`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..anatomy.attention import HEADS
from ..anatomy.linears import DROPOUTS
from ..errors import UnsupportedError, describe
from ..marks import untyped
from ..ranks.collectives import Group, all_gather_number
from ..ranks.group import TensorParallelGroup
from ..ranks.random_state import random_state, set_random_state
from ..slices.layout import Layout, Split
from ..strategies import TensorParallelLayer, block_of, take
from ..strategies.signature import FEATURES
from ..torch_api import TorchDispatchMode

_STEP = 0x9E3779B97F4A7C15
"""Difference between the seeds of neighbouring ranks: 2**64 divided by the golden ratio."""


class OwnRandomness:
    """Lets a rank draw its own numbers between the layers, or the blocks, of one module."""

    def __init__(self, rank: int, device: torch.device, group: Group | None = None) -> None:
        self.rank = rank
        self.device = device
        self.group = group
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
        self.sequence_block: TensorParallelLayer | None = None
        """Strategy of a child that gathers the sequence, if one does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnRandomness:
        copied = type(self)(self.rank, self.device, self.group)
        copied.settings = self.settings
        return copied

    def attach(self, module: nn.Module) -> None:
        """Draw from the own state between a column-parallel layer of `module` and the next row-parallel one.

        Without a row-parallel layer, or if a forward raises (recomputation stops by raising), up to the end of
        `module`. With a sharded sequence: from the end of a block, which gathers the sequence, to the start of the
        next.
        """
        self.settings = _settings(module)
        block_of(module).guards.append(self)

    def begin(self, module: nn.Module) -> None:
        """Before the module: find out whether it drops anything, and hook the layers that it now consists of."""
        self.leave()
        self.draws = module.training and _drops(module, self.settings)
        if not self.draws:
            return
        children = list(module.children())
        self.children = WeakSet(children)
        blocks = (strategy for strategy in map(_strategy, children) if strategy is not None)
        self.sequence_block = next((block for block in blocks if block.signature.gathers_sequence), None)
        for child in children:
            strategy = _strategy(child)
            if child in self.hooked or (strategy is None and self.sequence_block is None):
                continue
            self.hooked.add(child)
            if strategy is None:
                child.register_forward_pre_hook(self.enter_sequence_shard)
            elif strategy.signature.gathers_sequence:
                child.register_forward_pre_hook(self.leave)
                child.register_forward_hook(self.enter_sequence_shard)
            elif strategy.signature.takes is FEATURES:
                child.register_forward_pre_hook(self.leave)
            elif strategy.signature.leaves is FEATURES:
                child.register_forward_hook(self.enter_after)
                if "tp_strategy" not in child.__dict__:  # an adapter, which may drop some of its replicated input
                    child.register_forward_pre_hook(self.leave)

    def enter_after(self, child: nn.Module, *_: Any) -> None:
        """Switch to the own state, unless `child` is inside an adapter, which goes on with replicated activations."""
        if child in self.children:
            self.enter()

    def enter_sequence_shard(self, *_: Any) -> None:
        """Switch to the own state if this rank has a shard of the sequence."""
        if self.group is not None and self.sequence_block is not None and self.sequence_block.is_sharded(self.group):
            self.enter()

    def enter(self) -> None:
        """Switch to the own state; the shared state advances by one number on every rank."""
        if self.draws and not self._has_entered():
            seed = _next_seed(self.device)
            self.shared = random_state(self.device)
            self.seed = (seed + _STEP * (self.rank + 1)) % 2**63
            _generator(self.device).manual_seed(self.seed)

    def leave(self, *_: Any) -> None:
        """Switch back to the shared state."""
        if self.shared is not None and self._has_entered():
            set_random_state(self.device, self.shared)
        self.shared = None

    def _has_entered(self) -> bool:
        return self.shared is not None and _generator(self.device).initial_seed() == self.seed


class FullMasks(OwnRandomness):
    """Lets a rank draw the masks of all heads and features from the shared state, and use its shard of them."""

    def __init__(self, rank: int, device: torch.device, heads: Split | None = None) -> None:
        super().__init__(rank, device)
        self.heads = heads
        """Split of the heads, of attention."""
        self.mode: _FullDraws | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FullMasks:
        copied = type(self)(self.rank, self.device, self.heads)
        copied.settings = self.settings
        return copied

    def enter(self) -> None:
        """Draw full masks from here on.

        Raises UnsupportedError elsewhere than on a CPU, where kernels draw, and under torch.compile, which draws other
        numbers than torch.
        """
        if not self.draws or self.mode is not None:
            return
        if torch.compiler.is_dynamo_compiling():
            _note_compilation()
        elif _is_compilation_noted():
            raise _unsupported("torch.compile", "a forward that is not compiled")
        if self.device.type != "cpu":
            raise _unsupported(f"a device of type {self.device.type}", "a CPU")
        splits = [strategy.sharded_input for strategy in map(_strategy, self.children) if strategy is not None]
        self.mode = _FullDraws(self.rank, self.heads, [split for split in splits if split is not None])
        self.mode.__enter__()

    def leave(self, *_: Any) -> None:
        """Draw as torch does."""
        mode, self.mode = self.mode, None
        if mode is not None:
            mode.__exit__(None, None, None)


class _FullDraws(TorchDispatchMode):  # type: ignore[misc]
    """Dropout on a CPU fills a mask of the shape of its input; here it fills the full one, and copies a shard of it."""

    def __init__(self, rank: int, heads: Split | None, features: Iterable[Split]) -> None:
        super().__init__()
        self.rank = rank
        self.heads = heads
        self.features = {split.widths[rank]: split for split in features}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **kwargs)
        mask, *rest = args
        dim, split = self._sharded_dim(mask)
        shape = [split.length if i == dim else length for i, length in enumerate(mask.shape)]
        order = sorted(range(mask.ndim), key=mask.stride, reverse=True)
        full = func(torch.empty_permuted(shape, order, dtype=mask.dtype, device=mask.device), *rest, **kwargs)
        return mask.copy_(take(full, Layout(dim, split), self.rank))

    def _sharded_dim(self, mask: Tensor) -> tuple[int, Split]:
        """The dim of a mask that is sharded, and its split: the heads of attention, elsewhere the features."""
        if self.heads is not None:
            if mask.ndim >= 4 and mask.shape[HEADS] == self.heads.widths[self.rank]:
                return mask.ndim + HEADS, self.heads
            expected = "this rank's heads (..., heads, queries, keys)"
        else:
            if mask.shape[-1] in self.features:
                return mask.ndim - 1, self.features[mask.shape[-1]]
            expected = "this rank's features (..., features)"
        raise _unsupported(f"a mask of {tuple(mask.shape)}", expected)


_compilations: list[bool] = []
"""Not empty if torch.compile has reached a dropout of shards. There its graph breaks, and Python goes on."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # called, not traced
def _note_compilation() -> None:
    _compilations.append(True)


def _is_compilation_noted() -> bool:
    is_noted = bool(_compilations)
    _compilations.clear()
    return is_noted


def _unsupported(got: str, expected: str) -> UnsupportedError:
    fix = "Set the dropouts of the config to 0."
    return UnsupportedError(describe("dropout with tp_invariant=True", got=got, expected=expected, fix=fix))


class SharedRandomness:
    """Lets ranks draw the same numbers in a module that computes on the samples of all; outside, each draws its own."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group
        self.own: Tensor | None = None
        """The state of this rank, while it draws from the shared one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedRandomness:
        return type(self)(self.group)

    def attach(self, module: nn.Module) -> None:
        """Draw from the shared state from the start of `module` to its end, also if it raises."""
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.leave, always_call=True)

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Before the module: if it drops anything, use the first rank's next number as the seed (one all-gather)."""
        self.leave()
        if module.training and any(_drops(inner, _settings(inner)) for inner in module.modules()):
            device, process_group = self.group.device, self.group.process_group
            assert process_group is not None
            seeds = all_gather_number(_next_seed(device), process_group, device)
            self.own = random_state(device)
            _generator(device).manual_seed(seeds[0])

    def leave(self, *_: Any) -> None:
        """Switch back to the state of this rank."""
        if self.own is not None:
            set_random_state(self.group.device, self.own)
            self.own = None


def _strategy(module: nn.Module) -> TensorParallelLayer | None:
    """The strategy of a layer; for an adapter such as LoRA, that of its base layer."""
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        module = untyped(module).base_layer
    return module.__dict__.get("tp_strategy")


Settings = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of the attributes of a module, and of its config, that may be a dropout probability."""


def _settings(module: nn.Module) -> Settings:
    holders = (module, getattr(module, "config", None))
    own, of_config = (tuple(name for name in getattr(holder, "__dict__", ()) if "drop" in name) for holder in holders)
    return own, of_config


def _drops(module: nn.Module, settings: Settings) -> bool:
    """True if a module drops anything itself: by its own setting, by one of its config, or by a dropout child."""
    config = getattr(module, "config", None)
    for holder, names in zip((module, config), settings, strict=True):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, float) and value > 0:
                return True
    return any(isinstance(child, DROPOUTS) and child.p > 0 for child in module.children())


def _next_seed(device: torch.device) -> int:
    """Draw a number below 2**62 from the default generator of `device`.

    This does not synchronise with a GPU: there the number is a hash of the generator's state, which is on the host.
    """
    if device.type == "cpu":
        return int(torch.randint(2**62, (), device=device))
    state = random_state(device)
    torch.rand((), device=device)
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest(), "little") >> 2


def _generator(device: torch.device) -> Any:
    """The object with the seed of a device's default generator."""
    return torch.default_generator if device.type == "cpu" else torch.get_device_module(device)
