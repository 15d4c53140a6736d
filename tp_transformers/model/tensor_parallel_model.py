"""Methods of a loaded model that differ from those of its own class: saving, moving, copying."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from ..checkpoint.reading.report import LoadReport
from ..checkpoint.saving.save import save_pretrained
from ..copies import copied_only
from ..marks import untyped
from ..plans.bind import Resolution
from ..ranks.group import GROUP, TensorParallelGroup
from ..seams import Mixin, added, collective, features
from ..strategies import SHARD, local_tensor
from .generate import TensorParallelGeneration


class TensorParallelModel(Mixin):
    """Methods of a model loaded with a plan that differ from those of its own class; it stays an instance of it."""

    tp_group: TensorParallelGroup
    """The ranks that share the model."""
    tp_resolution: Resolution
    """The plan in force, module by module."""
    tp_report: LoadReport
    """How this rank loaded its shard."""
    tp_options: Mapping[str, Any]
    """The options of the load: argument -> value, without None."""
    tp_source: Mapping[str, str | None]
    """The "name" of the checkpoint and, if it is from the Hub, its "commit_hash"."""

    @property
    def device(self) -> torch.device:
        """The device of this rank's shards, for inputs; placeholders of parameters are on the meta device."""
        return self.tp_group.device

    @collective
    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write a normal checkpoint from rank 0. Collective; see `checkpoint.saving.save.save_pretrained`."""
        save_pretrained(self, save_directory, *args, **kwargs)

    def _tp_sample(self, arguments: Mapping[str, Any] | None = None) -> Any:
        """What `_tp_compare` gets of all ranks when they generate with `arguments` or save; features override both."""

    def _tp_compare(self, samples: Sequence[Any]) -> None:
        """Called with the samples of all ranks."""

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of this rank's parameters and buffers."""
        tensors = [*self.parameters(), *(self.buffers() if return_buffers else ())]
        return sum(local_tensor(tensor).nbytes for tensor in tensors if not tensor.is_meta)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Implement `to`, `half`, `cuda`, ...: shards stay shards."""
        with keep_shards(self):
            return super()._apply(fn, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Allow deep copies, over the same ranks. Reject a pickle, which would hold one rank's shards."""
        name, mesh = f"pickle of a tensor-parallel {type(self).__name__}", self.tp_group.device_mesh
        return copied_only(self, name, "the model of one rank", shared=(mesh,))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Finish a copy: it holds the patches, too."""
        super().__setstate__(state)
        hold_patches(self)


def hold_patches(model: object) -> None:
    """Keep the patches of torch and others that handle shards in place as long as `model` lives."""
    for patch in added("model_patches"):
        patch.hold_for(model)


def become_tensor_parallel(model: nn.Module, resolution: Resolution, group: TensorParallelGroup) -> None:
    """Change the class of `model` to a subclass with the same name that is also a TensorParallelModel."""
    model.__class__ = _tensor_parallel_class(untyped(type(model)))
    GROUP.put(model, group)
    untyped(model).tp_resolution = resolution


@cache
def _tensor_parallel_class(cls: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    bases = (TensorParallelGeneration, TensorParallelModel) if hasattr(cls, "generate") else (TensorParallelModel,)
    return type(cls.__name__, (*added("model_methods"), *bases, cls), names)


def keep_state(module: nn.Module) -> None:
    """Keep the shards of `module` in deep copies; features add hooks, which also run under a wrapper of the model."""
    for feature in features().values():
        feature.sharded(module)
    untyped(module).tp_copies = _Copies(module)


class _Copies:
    """On a module: puts the shard marks of its parameters on their deep copies; torch's copies drop them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copies:
        for param in self.module._parameters.values():
            if id(param) in memo and hasattr(param, SHARD.name):
                SHARD.put(memo[id(param)], SHARD.of(param))
        return _Copies(memo.get(id(self.module), self.module))


@contextmanager
def keep_shards(module: nn.Module) -> Iterator[None]:
    """Put the shard marks back on parameters that the block recreates: a DTensor of another dtype is a new one."""
    shards = {
        name: SHARD.of(param)
        for name, param in module.named_parameters(remove_duplicate=False)
        if hasattr(param, SHARD.name)
    }
    yield
    for name, param in module.named_parameters(remove_duplicate=False):
        if name in shards:
            SHARD.put(param, shards[name])
