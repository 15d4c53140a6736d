"""Methods of a loaded model that differ from those of its own class: saving, loading, copying."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from ..anatomy.names import check_values
from ..checkpoint.reading.report import LoadReport
from ..checkpoint.saving.save import save_pretrained
from ..copies import copied_only
from ..marks import untyped
from ..plans.attention_heads import check_cache
from ..plans.bind import Resolution
from ..ranks.direct import refuse_transforms
from ..ranks.group import GROUP, TensorParallelGroup
from ..seams import collective, features, model_patches
from ..strategies import local_tensor, unsharded_like
from .clip import FULL_NORMS
from .generate import TensorParallelGeneration
from .state_dict import check_device, keep_shards

_Model: Any = object
"""Base of the mixin; in the class of a model, a PreTrainedModel follows it in the MRO."""


class TensorParallelModel(_Model):
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own class. Raises UnsupportedError in torch.func, and for a cache of another layout."""
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        if self.tp_group.size > 1:
            refuse_transforms()
        try:
            return super().__call__(*args, **kwargs)
        except RuntimeError:
            check_cache(self, kwargs.get("past_key_values", kwargs.get("cache")))  # renamed in transformers 5.24
            raise

    @collective
    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write a normal checkpoint from rank 0. Collective; see `checkpoint.saving.save.save_pretrained`."""
        save_pretrained(self, save_directory, *args, **kwargs)

    @collective
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load full tensors, or the result of `state_dict()` on this rank. Collective."""
        with self.tp_group.agree():
            check_values(self, "load_state_dict")
            return super().load_state_dict(state_dict, *args, **kwargs)

    def _tp_sample(self) -> Any:
        """What `_tp_compare` gets of all ranks when they generate or save; features override both."""

    def _tp_compare(self, samples: Sequence[Any]) -> None:
        """Called with the samples of all ranks."""

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count the parameters of the full model, as in one process."""
        embeddings = {
            param for module in self.modules() if isinstance(module, nn.Embedding) for param in module.parameters()
        }
        return sum(
            unsharded_like(param).numel()
            for param in self.parameters()
            if (param.requires_grad or not only_trainable) and not (exclude_embeddings and param in embeddings)
        )

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of this rank's parameters and buffers."""
        tensors = [*self.parameters(), *(self.buffers() if return_buffers else ())]
        return sum(local_tensor(tensor).nbytes for tensor in tensors if not tensor.is_meta)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Implement `to`, `half`, `cuda`, ...: shards stay shards, on the mesh's own device."""
        check_device(fn, self.tp_group)
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
    for patch in (FULL_NORMS, *model_patches()):
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
    added = [methods for feature in features().values() for methods in feature.model_methods()]
    return type(cls.__name__, (*added, *bases, cls), names)
