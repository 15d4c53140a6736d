"""Mixers whose forwards read the parameters and buffers of the modules in them, without calling these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ...anatomy.mixers import first_long_dim
from ...slices.layout import Layout, Split
from ..attach import wrap_forward
from ..shards.shard import ParamShard
from ..shards.slicing import take


def mix_locally(module: nn.Module, shards: Mapping[str, ParamShard], splits: Mapping[str, Split], rank: int) -> None:
    """Let the forward of a mixer see this rank's part of the parameters and buffers that it reads of itself.

    It is not in training then: in training, kernels put a whole mixer in one call, its norm and its output projection
    included, which communicate.

    Args:
        shards: this rank's shards of parameters that it reads, by their names in it.
        splits: how heads cut the features of what is in it; those of buffers are looked up.
    """
    views = {name: shard for name, shard in shards.items() if shard.needs_view}
    cut = {name: split for name, split in splits.items() if name in module._buffers}

    def own(buffer: Tensor, split: Split) -> Tensor:
        return take(buffer, Layout(first_long_dim(buffer.shape), split), rank)

    def around(call: Callable[..., Any], mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
        params = {name: mod.get_parameter(name) for name in views}
        buffers, training = {name: mod.get_buffer(name) for name in cut}, mod.training
        try:
            for name, param in params.items():
                _put(mod, name, views[name].view(param))
            mod._buffers.update({name: own(buffer, cut[name]) for name, buffer in buffers.items()})
            if training:
                mod.training = False
            return call(mod, *args, **kwargs)
        finally:
            if training:
                mod.training = True
            mod._buffers.update(buffers)
            for name, param in params.items():
                _put(mod, name, param)

    wrap_forward(module, around)


def _put(module: nn.Module, name: str, param: Tensor) -> None:
    owner, _, param_type = name.rpartition(".")
    module.get_submodule(owner)._parameters[param_type] = param  # type: ignore[assignment]
