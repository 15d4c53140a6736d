"""Mixers with forwards that read parameters and buffers of their children without calling them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...slices.layout import Layout, Split
from ...strategies.forward.attach import argument_names, parameter_of, put_parameters, wrap_forward
from ...strategies.forward.communication import Forwarder
from ...strategies.shards.shard import ParamShard
from ...strategies.shards.slicing import take
from .counts import first_long_dim


def mix_locally(
    module: nn.Module, shards: Mapping[str, ParamShard], splits: Mapping[str, Split], states: Sequence[str], rank: int
) -> None:
    """Wrap the forward of a mixer so that the parameters and buffers it reads are this rank's shards.

    The forward runs with `training=False`: in training, fused kernels compute the complete mixer in one call, including
    its norm and output projection, which have to communicate.

    Args:
        module: the mixer.
        shards: this rank's shards of the parameters that the forward reads, by their names in `module`.
        splits: splits of the features by heads, by name; used for buffers and states.
        states: states among the arguments, as `argument.index`. Models make them for all heads; this rank's heads
            replace them in place.
        rank: this rank.
    """
    arguments = argument_names(module)
    views = {name: shard for name, shard in shards.items() if shard.needs_view}
    buffer_splits = {name: split for name, split in splits.items() if name in module._buffers}

    def local_buffer(buffer: Tensor, split: Split) -> Tensor:
        return take(buffer, Layout(first_long_dim(buffer.shape), split), rank)

    def around(call: Forwarder) -> Forwarder:
        def forward(mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
            buffers, training = {name: mod.get_buffer(name) for name in buffer_splits}, mod.training
            values = {**dict(zip(arguments, args, strict=False)), **kwargs}
            for name in states:
                argument, _, index = name.rpartition(".")
                if values.get(argument) is not None:
                    _slice_state(values[argument], int(index), splits[name], rank)
            local = {name: shard.view(parameter_of(mod, name)) for name, shard in views.items()}
            params = put_parameters(mod, local)
            try:
                mod._buffers.update(
                    {name: local_buffer(buffer, buffer_splits[name]) for name, buffer in buffers.items()}
                )
                if training:
                    mod.training = False
                return call(mod, *args, **kwargs)
            finally:
                if training:
                    mod.training = True
                mod._buffers.update(buffers)
                put_parameters(mod, params)

        return forward

    wrap_forward(module, around)


def _slice_state(states: Any, index: int, split: Split, rank: int) -> None:
    """Replace a state of all heads, (batch, heads or features, ...), by the slice of this rank's heads.

    In a list, the entry is replaced. In a tuple, `.data` of the tensor is set, which breaks a graph of torch.compile.
    """
    state: Tensor = states[index]
    if state.shape[1] != split.length:
        return
    local = take(state, Layout(1, split), rank).clone()
    if isinstance(states, list):
        states[index] = local
    else:
        state.data = local
