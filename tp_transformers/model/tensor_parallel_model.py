"""Methods of a loaded model that differ from those of its own class: saving, loading, copying, embeddings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.quantization.packed import packed_weights, refuse_packed, without_packed
from ..checkpoint.reading.report import LoadReport
from ..checkpoint.saving.push import push, save_and_push
from ..checkpoint.saving.save import save_pretrained
from ..copies import copied_only
from ..marks import untyped
from ..plans.bind import Resolution
from ..ranks.group import GROUP, TensorParallelGroup
from ..strategies import local_tensor, whole_like
from ..strategies.parameters.tensors import ASSIGNED_VALUES, FULL_BYTES
from .adapters.files import load_adapter, save_adapter
from .adapters.hotswap import HOT_SWAPS
from .adapters.inject import WATCH_ADAPTERS
from .clip import WHOLE_NORMS
from .continuous_batching import OWN_CACHE
from .failures import WatchedModel, fail_together
from .generate import TensorParallelGeneration
from .grad_scaler import SHARED_INFINITIES
from .kernels import check_kernels
from .optimizers.step import STEPS_ON_SHARDS
from .state_dict import check_device, keep_shards, replace_embeddings, resize_embeddings
from .wrappers import WHOLE_MODELS_ALONE

_Model: Any = object
"""Base of the methods: a PreTrainedModel, in the class of a model."""


class TensorParallelModel(WatchedModel, _Model):
    """Methods of a model that is loaded with a plan, beyond those of its own class; it stays an instance of that."""

    tp_group: TensorParallelGroup
    """The ranks that share the model."""
    tp_resolution: Resolution
    """The plan in force, module by module."""
    tp_report: LoadReport
    """How this rank came by its shard."""
    tp_source: Mapping[str, str | None]
    """The "name" of the checkpoint and, where it is in the cache of the Hub, its "commit_hash"."""

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write a normal checkpoint from rank 0; every rank has to call it. See `checkpoint.save.save_pretrained`.

        A model with an adapter of transformers' saves the adapter alone.
        """
        with fail_together(self):
            if push_to_hub:
                tags = self.model_tags or ()
                save_and_push(self.tp_group, self.save_pretrained, save_directory, tags=tags, **kwargs)
            elif getattr(self, "_hf_peft_config_loaded", False):
                save_adapter(self, Path(save_directory))
            else:
                save_pretrained(self, save_directory, *args, **kwargs)

    def push_to_hub(
        self, repo_id: str, *, max_shard_size: int | str = "50GB", tags: Iterable[str] = (), **options: Any
    ) -> Any:
        """Upload a normal checkpoint from rank 0; every rank has to call it. See `checkpoint.push.push`."""
        save = partial(self.save_pretrained, max_shard_size=max_shard_size)
        tags = [*(self.model_tags or ()), *([tags] if isinstance(tags, str) else tags or ())]
        with fail_together(self):
            return push(self.tp_group, save, repo_id, tags=tags, **options)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load a whole adapter of PEFT, cut to this rank; every rank has to call it."""
        if self.tp_group.device_mesh is None:
            return super().load_adapter(*args, **kwargs)
        with fail_together(self):
            return load_adapter(self, *args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's shards. Raises UnsupportedError where weights are packed, unless for parameters (`keep_vars`).

        With adapters, packed weights are on the meta device in it: peft looks for its own parameters there.
        """
        if not kwargs.get("keep_vars") and not any(hasattr(module, "lora_A") for module in self.modules()):
            refuse_packed(self, "state_dict")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load full tensors, or the result of `state_dict()` on this rank; every rank has to call it."""
        with fail_together(self), self.tp_group.agree():
            refuse_packed(self, "load_state_dict")
            return super().load_state_dict(state_dict, *args, **kwargs)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Parameters of the whole model, as one process counts them."""
        embeddings = {
            param for module in self.modules() if isinstance(module, nn.Embedding) for param in module.parameters()
        }
        return sum(
            whole_like(param).numel()
            for param in self.parameters()
            if (param.requires_grad or not only_trainable) and not (exclude_embeddings and param in embeddings)
        )

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes that this rank holds, in parameters and in buffers."""
        held = [*self.parameters(), *(self.buffers() if return_buffers else ())]
        packed = sum(weight.nbytes for weight in packed_weights(self).values())
        return packed + sum(local_tensor(tensor).nbytes for tensor in held if not tensor.is_meta)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Take whole embeddings, the same on all ranks, and cut them as the plan says; every rank has to call it."""
        with fail_together(self):
            old = self.get_input_embeddings()
            super().set_input_embeddings(value)
            replace_embeddings(old, value, self.tp_group)

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Take a whole head, the same on all ranks, and cut it as the plan says; every rank has to call it."""
        with fail_together(self):
            old = self.get_output_embeddings()
            super().set_output_embeddings(value)
            replace_embeddings(old, value, self.tp_group)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """The method of transformers, on complete embeddings that are cut again; every rank has to call it."""
        resize = partial(super().resize_token_embeddings, new_num_tokens, *args, **kwargs)
        if self.tp_group.device_mesh is None:
            return resize()
        with fail_together(self):
            return resize_embeddings(self, resize)

    def set_use_kernels(self, use_kernels: bool, *args: Any, **kwargs: Any) -> None:
        """Take kernels of the Hub in place of forwards; every rank has to call it.

        Raises UnsupportedError on all ranks where one would leave out communication; see `check_kernels`.
        """
        use = partial(super().set_use_kernels, use_kernels, *args, **kwargs)
        if not use_kernels:
            use()
            return
        with check_kernels(self):
            use()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """The method behind `to`, `half`, `cuda`, ...: on the mesh's own device, shards stay shards."""
        check_device(fn, self.tp_group)
        with keep_shards(self), without_packed(self, fn):
            return super()._apply(fn, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies are split over the same ranks. A pickle is refused: ranks hold process groups, and a part each."""
        name, mesh = f"pickle of a tensor-parallel {type(self).__name__}", self.tp_group.device_mesh
        return copied_only(self, name, "the model of one rank", shared=(mesh,))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The end of a copy."""
        super().__setstate__(state)
        hold_patches(self)


_PATCHES = (
    WATCH_ADAPTERS,
    HOT_SWAPS,
    STEPS_ON_SHARDS,
    SHARED_INFINITIES,
    WHOLE_NORMS,
    OWN_CACHE,
    ASSIGNED_VALUES,
    FULL_BYTES,
    WHOLE_MODELS_ALONE,
)


def hold_patches(model: object) -> None:
    """As long as `model` lives, torch's optimizers, GradScaler and clipping know shards, and peft knows the model."""
    for patch in _PATCHES:
        patch.hold_for(model)


def become_tensor_parallel(model: nn.Module, resolution: Resolution, group: TensorParallelGroup) -> None:
    """Make the model an instance of a subclass of its class, of the same name, that is a TensorParallelModel too."""
    model.__class__ = _tensor_parallel_class(untyped(type(model)))
    GROUP.put(model, group)
    untyped(model).tp_resolution = resolution


@cache
def _tensor_parallel_class(cls: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    bases = (TensorParallelGeneration, TensorParallelModel) if hasattr(cls, "generate") else (TensorParallelModel,)
    return type(cls.__name__, (*bases, cls), names)
