"""A meta-device model and a plan -> the same model with local shapes and communication attached."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..anatomy.names import base_prefix, fold_layers
from ..checkpoint.reading.report import LoadReport
from ..checkpoint.saving.push import push, save_and_push
from ..checkpoint.saving.save import save_pretrained
from ..errors import UnsupportedError, describe
from ..logs import get_logger
from ..plans.bind import Resolution, resolve
from ..plans.rules import Plan
from ..plans.shares import check_layers_are_cut
from ..ranks.group import TensorParallelGroup
from ..strategies import (
    BatchWhole,
    LocalConfig,
    ParamShard,
    SequenceBlock,
    TensorParallelLayer,
    attach,
    passes_dtensors,
)
from ..training.clip import split_steps
from .adapters.files import load_adapter, save_adapter
from .adapters.inject import watch_adapters
from .attentions import return_whole_attentions
from .dropout import OwnRandomness, SharedRandomness
from .generate import TensorParallelGeneration
from .kernels import check_kernels
from .state_dict import (
    check_device,
    keep_shards,
    keep_state,
    memory_footprint,
    num_parameters,
    replace_embeddings,
    resize_embeddings,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = get_logger(__name__)


class TensorParallelModel:
    """What a model that is loaded with a plan can do beyond its own class, which it stays an instance of."""

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

        Of a model with an adapter, which transformers gave it, that is the adapter.
        """
        if push_to_hub:
            tags = self.model_tags or ()  # type: ignore[attr-defined]
            save_and_push(self.tp_group, self.save_pretrained, save_directory, tags=tags, **kwargs)
        elif getattr(self, "_hf_peft_config_loaded", False):
            save_adapter(self, Path(save_directory))  # type: ignore[arg-type]
        else:
            save_pretrained(self, save_directory, *args, **kwargs)  # type: ignore[arg-type]

    def push_to_hub(
        self, repo_id: str, *, max_shard_size: int | str = "50GB", tags: Iterable[str] = (), **options: Any
    ) -> Any:
        """Upload a normal checkpoint from rank 0; every rank has to call it. See `checkpoint.push.push`."""
        save = partial(self.save_pretrained, max_shard_size=max_shard_size)
        tags = [*(self.model_tags or ()), *([tags] if isinstance(tags, str) else tags or ())]  # type: ignore[attr-defined]
        return push(self.tp_group, save, repo_id, tags=tags, **options)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load a whole adapter of PEFT, cut to this rank; every rank has to call it."""
        if self.tp_group.device_mesh is None:
            return super().load_adapter(*args, **kwargs)  # type: ignore[misc]
        return load_adapter(self, *args, **kwargs)  # type: ignore[arg-type]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load whole tensors, or what `state_dict()` returned on this rank; every rank has to call it."""
        with self.tp_group.agree():
            return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Parameters of the whole model, as one process counts them."""
        return num_parameters(self, only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)  # type: ignore[arg-type]

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes that this rank holds."""
        return memory_footprint(self, buffers=return_buffers)  # type: ignore[arg-type]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Take whole embeddings, the same on all ranks, and cut them as the plan says; every rank has to call it."""
        old = self.get_input_embeddings()  # type: ignore[attr-defined]
        super().set_input_embeddings(value)  # type: ignore[misc]
        replace_embeddings(old, value, self.tp_group)

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Take a whole head, the same on all ranks, and cut it as the plan says; every rank has to call it."""
        old = self.get_output_embeddings()  # type: ignore[attr-defined]
        super().set_output_embeddings(value)  # type: ignore[misc]
        replace_embeddings(old, value, self.tp_group)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """What transformers does, on whole embeddings that are cut again; every rank has to call it."""
        resize = partial(super().resize_token_embeddings, new_num_tokens, *args, **kwargs)  # type: ignore[misc]
        if self.tp_group.device_mesh is None:
            return resize()
        return resize_embeddings(self, resize)  # type: ignore[arg-type]

    def set_use_kernels(self, use_kernels: bool, *args: Any, **kwargs: Any) -> None:
        """Take kernels of the Hub in place of forwards; every rank has to call it.

        Raises UnsupportedError on all ranks where one would leave out what a rank communicates; see `check_kernels`.
        """
        use = partial(super().set_use_kernels, use_kernels, *args, **kwargs)  # type: ignore[misc]
        if not use_kernels:
            use()
            return
        with check_kernels(self):  # type: ignore[arg-type]
            use()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """What is behind `to`, `half`, `cuda`, ...: on the mesh's own device, shards stay shards."""
        check_device(fn, self.tp_group)
        with keep_shards(self):  # type: ignore[arg-type]
            return super()._apply(fn, *args, **kwargs)  # type: ignore[misc]

    def __copy__(self) -> Any:
        copied: nn.Module = type(self).__new__(type(self))  # type: ignore[assignment]
        copied.__dict__.update(self.__dict__)
        watch_adapters(copied)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: its ranks hold process groups, and a part of the model each."""
        raise UnsupportedError(
            describe(
                f"pickle of a tensor-parallel {type(self).__name__}",
                got="the model of one rank",
                expected="its state",
                fix="Call model.save_pretrained(folder) or tp_transformers.save_sharded(model, folder) on all ranks, "
                "or torch.save(model.state_dict(), a file of each rank).",
            )
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that is split over the same ranks."""
        module: nn.Module = self  # type: ignore[assignment]
        copied: nn.Module = type(self).__new__(type(self))  # type: ignore[assignment]
        memo.update({id(self): copied, id(self.tp_group.device_mesh): self.tp_group.device_mesh})
        copied.__dict__.update(copy.deepcopy(module.__dict__, memo))
        copies = dict(copied.named_parameters(remove_duplicate=False))
        for name, param in module.named_parameters(remove_duplicate=False):
            if hasattr(param, "tp_shard"):
                copies[name].tp_shard = param.tp_shard  # type: ignore[attr-defined]
        watch_adapters(copied)
        return copied


def is_tensor_parallel(model: object) -> bool:
    """Whether `model` was loaded with a `tp_plan` by this package (also on one rank), or is PEFT's around one."""
    return isinstance(getattr(model, "tp_group", None), TensorParallelGroup)


def parallelize(
    model: PreTrainedModel, plan: Plan, group: TensorParallelGroup, *, allow_replicated: bool = False
) -> Resolution:
    """Give every parameter of `model` its local shape and every module its communication, in place.

    Args:
        model: a transformers model on the meta device.
        plan: what to split how.
        group: the ranks.
        allow_replicated: whether a plan that a transformers class declares may leave whole layers on every rank.

    Raises:
        PlanError: if the plan does not fit; the model is then untouched.
    """
    # 1. Bind the plan to the modules. Nothing is changed before every fault is known.
    with group.agree():
        resolution = resolve(plan, model, group.size)
        warning = None
        if plan.declared and not allow_replicated:
            warning = check_layers_are_cut(model, plan, resolution, group.size)
    whole = {name: (tuple(param.shape), str(param.dtype)) for name, param in model.named_parameters()}
    plan = resolution.plan
    group.check_same("the plan", plan.as_dict())
    group.check_same("tp_reduce_dtype", str(group.reduce_dtype))
    group.check_same("the model's config", whole)
    if group.rank == 0:
        for note in (*resolution.notes, warning):
            if note is not None:
                logger.warning("%s", note)
        if resolution.uncovered:
            folded = sorted(set(map(fold_layers, resolution.uncovered)))
            logger.info("%s: no rule covers %s; every rank holds them whole", plan.source, ", ".join(folded))

    # 2. Local shapes.
    shards = {
        name: _local_parameter(model, name, resolution, group)
        for name, _ in list(model.named_parameters(remove_duplicate=False))
    }

    # 3. Local head counts, on the module alone: the config is shared and stays as it is.
    for name, heads in resolution.attention.items():
        module = model.get_submodule(name)
        for attribute, value in heads.attributes(group.rank).items():
            if hasattr(module, attribute):
                setattr(module, attribute, value)
        if heads.is_fused and hasattr(module, "config"):
            module.config = LocalConfig(module.config, **heads.config_attributes(group.rank))  # type: ignore[assignment]

    # 4. Communication.
    if group.device_mesh is not None:
        takes_dtensors = any(map(passes_dtensors, resolution.module_strategies.values()))
        for name, strategy in _owners(resolution).items():
            module = model.get_submodule(name)
            own = {param: shards[f"{name}.{param}".lstrip(".")] for param, _ in module.named_parameters(recurse=False)}
            attach(module, strategy, own, group.device_mesh, takes_dtensors=takes_dtensors)
        for module in model.modules():
            if module._parameters:
                keep_state(module)
        return_whole_attentions(model, resolution.attention, group)
        for name in dict.fromkeys(
            name.rpartition(".")[0]
            for name, strategy in resolution.module_strategies.items()
            if strategy.leaves_sharded_output or isinstance(strategy, SequenceBlock)
        ):
            OwnRandomness(group.rank, group.device, group.process_group).attach(model.get_submodule(name))
        for name, strategy in resolution.module_strategies.items():
            if isinstance(strategy, BatchWhole):  # after what is inside: its own states begin in the shared one
                SharedRandomness(group).attach(model.get_submodule(name))

    # 5. The model knows what it is, and so does what is put around it.
    watch_adapters(model)
    split_steps()
    for module in list(model.modules()):
        if hasattr(module, "save_pretrained"):
            _become_tensor_parallel(module, resolution, group)
    model._tp_plan = plan.as_dict(base_prefix(model))
    model._tp_size = group.size
    model._device_mesh = group.device_mesh
    return resolution


def _local_parameter(model: nn.Module, name: str, resolution: Resolution, group: TensorParallelGroup) -> ParamShard:
    """Swap one meta parameter for a meta parameter of this rank's shape; returns what the rank holds."""
    owner_name, _, param_type = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    whole: nn.Parameter = getattr(owner, param_type)
    shard = resolution.shard(name, whole.shape, group)
    local = torch.empty(shard.local_shape, dtype=whole.dtype, device="meta")
    owner._parameters[param_type] = shard.wrap(local, requires_grad=whole.requires_grad)
    return shard


def _owners(resolution: Resolution) -> dict[str, TensorParallelLayer]:
    """Every module that needs attaching: those with a strategy, and those of which a rule cuts a parameter."""
    owners = dict(resolution.module_strategies)
    for name in resolution.param_strategies:
        owners.setdefault(name.rpartition(".")[0], TensorParallelLayer())
    return owners


def _become_tensor_parallel(model: nn.Module, resolution: Resolution, group: TensorParallelGroup) -> None:
    """Make the model an instance of a subclass of its class, of the same name, that is a TensorParallelModel too."""
    model.__class__ = _tensor_parallel_class(type(model))  # type: ignore[arg-type]
    model.tp_group = group  # type: ignore[assignment]
    model.tp_resolution = resolution  # type: ignore[assignment]


@cache
def _tensor_parallel_class(cls: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    bases = (TensorParallelGeneration, TensorParallelModel) if hasattr(cls, "generate") else (TensorParallelModel,)
    return type(cls.__name__, (*bases, cls), names)
