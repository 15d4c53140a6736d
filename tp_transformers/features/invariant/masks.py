"""Masks of dropouts with the bits of one process: a rank draws those of all heads and features, and uses a shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...anatomy import HEADS, is_inside
from ...errors import UnsupportedError
from ...model.dropout import OwnRandomness, layer_strategy
from ...slices.layout import Layout, Split
from ...strategies import take
from ...torch_api import TorchDispatchMode


def draw_full_masks(model: Any) -> None:
    """Replace the `OwnRandomness` of every module of a loaded model by `FullMasks`."""
    group, attention = model.tp_group, model.tp_resolution.attention
    for name, module in model.named_modules():
        guards = module.tp_block.guards if "tp_block" in vars(module) else []
        for index, guard in enumerate(guards):
            if type(guard) is OwnRandomness:
                around = (heads for other, heads in attention.items() if name == other or is_inside(name, other))
                heads = next((found.attended for found in around), None)
                guards[index] = masks = FullMasks(group.rank, group.device, heads)
                masks.settings = guard.settings


class FullMasks(OwnRandomness):
    """Lets a rank draw the masks of all heads and features from the shared state, and use its shard of them."""

    def __init__(self, rank: int, device: torch.device, heads: Split | None = None) -> None:
        super().__init__(rank, device)
        self.heads = heads
        """Split of the heads, of attention."""
        self.mode: FullDraws | None = None

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
        splits = [strategy.sharded_input for strategy in map(layer_strategy, self.children) if strategy is not None]
        self.mode = FullDraws(self.rank, self.heads, [split for split in splits if split is not None])
        self.mode.__enter__()

    def leave(self, *_: Any) -> None:
        """Draw as torch does."""
        mode, self.mode = self.mode, None
        if mode is not None:
            mode.__exit__(None, None, None)


class FullDraws(TorchDispatchMode):  # type: ignore[misc]
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
    return UnsupportedError("dropout with tp_invariant=True", got=got, expected=expected, fix=fix)
