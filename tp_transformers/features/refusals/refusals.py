"""Modules, wrappers and kernels that do not fit a tensor-parallel model: they raise on all ranks.

A module without a strategy in the place of a sharded one would have inputs or outputs with all features where its
neighbours have this rank's. Shapes do not always show it: an `nn.Linear` in k_proj's place makes more KV heads than the
rank has, and attention shares them out to other query heads.

transformers puts a kernel's function in place of a module's forward (`use_kernels=True`). The strategy's work around
that forward stays, and the kernel sees this rank's tensors. But a kernel for a larger block, such as the mixture of
experts of GPT-OSS, reads the parameters of the modules inside it and never calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ...anatomy import cache_in, fold_layers, inner
from ...errors import UnsupportedError
from ...marks import untyped
from ...patches import Patch, replace
from ...ranks.direct import refuse_transforms
from ...ranks.group import GROUP, TensorParallelGroup, agreed
from ...seams import Mixin
from ...strategies import SHARD, STRATEGY, TensorParallelLayer
from ...strategies.signature import FEATURES


class _Unsharded:
    """A forward pre-hook of the module that replaced the child `name` of `outer`."""

    def __init__(self, outer: nn.Module, name: str) -> None:
        self.outer, self.name = outer, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raise UnsupportedError while modules beside it are sharded, unless it has been sharded since."""
        if not _is_sharded(module) and any(_splits_features(child) for child in self.outer.children()):
            raise agreed(
                UnsupportedError(
                    f"{type(self.outer).__name__}.{self.name}",
                    got=f"a {type(module).__name__} in the place of a module that is sharded over the ranks",
                    expected="a module that is sharded like it, or that calls it",
                    fix="Replace it in the checkpoint's model, before from_pretrained shards it. Or shard the new "
                    "module: torch's parallelize_module takes tp_transformers.strategies.STRATEGIES[...].",
                )
            )


def _registered(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Handle `inner` becoming the child `name` of `outer`; torch calls this for every registered module."""
    former = outer._modules.get(name)
    if _splits_features(former) and inner is not None and not _is_sharded(inner):
        inner.register_forward_pre_hook(_Unsharded(outer, name))


def _splits_features(module: nn.Module | None) -> bool:
    """True if the inputs or outputs of `module` are this rank's shard of the features; an embedding takes ids."""
    if (strategy := STRATEGY.find(module)) is None or strategy.size == 1 or strategy.is_embedding:
        return False
    return FEATURES in (strategy.signature.takes, strategy.signature.leaves)


def _is_sharded(module: nn.Module) -> bool:
    """True if `module`, or one that it calls, has a strategy or parameters that are DTensors."""
    return any(STRATEGY.find(inner) for inner in module.modules()) or any(
        isinstance(param, DTensor) for param in module.parameters()
    )


UNSHARDED_MODULES_RAISE = Patch(
    "torch",
    "module registration hook of replaced modules",
    lambda: nn.modules.module.register_module_module_registration_hook(_registered).remove,
)
"""Makes a module that replaces a sharded one raise in its forward, on all ranks, unless it is sharded too."""


def _init(original: Callable[..., Any], wrapper: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    shards = filter(None, map(SHARD.find, module.parameters()))
    if any(shard.group.size > 1 for shard in shards):
        raise agreed(
            UnsupportedError(
                "DistributedDataParallel",
                got=f"a tensor-parallel {type(module).__name__}, of which each rank holds a shard",
                expected="an unsharded model on every rank",
                fix="Leave it out: the ranks of one model take the same batch. For copies that train on batches of "
                "their own, load with a mesh that has a dp axis, and call tp_transformers.data_parallel. With "
                "accelerate, do not prepare the model, or pass parallelism_config=ParallelismConfig(tp_size=...).",
            )
        )
    original(wrapper, module, *args, **kwargs)


UNSHARDED_MODELS_ONLY = Patch(
    "torch", "DistributedDataParallel.__init__", lambda: replace(DistributedDataParallel, "__init__", _init)
)
"""Makes DistributedDataParallel, and accelerate's `prepare`, raise for a tensor-parallel model, on all ranks."""


class RefusingModel(Mixin):
    """Methods of a loaded model that refuse what ranks cannot compute."""

    tp_group: TensorParallelGroup

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own class. Raises UnsupportedError in torch.func, and for a cache of another layout."""
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        if self.tp_group.size > 1:
            refuse_transforms()
        try:
            return super().__call__(*args, **kwargs)
        except RuntimeError:
            check_cache(self, cache_in(kwargs))
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Implement `to`, `half`, `cuda`, .... Raises UnsupportedError for another device than the mesh's."""
        device = fn(torch.empty(0, device=self.tp_group.device)).device
        if device != self.tp_group.device:
            raise UnsupportedError(
                "the device of a tensor-parallel model",
                got=str(device),
                expected=f"{self.tp_group.device}, which its mesh is made of",
                fix="Load it where it is to run; to have it elsewhere, save it with save_pretrained and load that.",
            )
        return super()._apply(fn, *args, **kwargs)

    def _generate(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        check_cache(self, cache_in(kwargs))
        return super()._generate(own, *args, **kwargs)

    def set_use_kernels(self, use_kernels: bool, *args: Any, **kwargs: Any) -> None:
        """Replace forwards by kernels of the Hub. Collective.

        Raises UnsupportedError on all ranks if a kernel would skip communication; see `check_kernels`.
        """
        with check_kernels(untyped(self)) if use_kernels else nullcontext():
            super().set_use_kernels(use_kernels, *args, **kwargs)


@contextmanager
def check_kernels(model: PreTrainedModel) -> Iterator[None]:
    """Let the block replace forwards of modules that compute by themselves, such as norms. Collective.

    Raises UnsupportedError on all ranks if it replaced the forward of a module that contains modules with strategies,
    or that holds experts. After an error on any rank, all forwards are restored.
    """
    attributes = ("_use_kernels", "kernel_config")
    before = {module: module.__dict__.get("forward") for module in model.modules()}
    kept = {name: model.__dict__[name] for name in attributes if name in model.__dict__}
    try:
        with GROUP.of(model).agree():
            yield
            unfit = {
                f"{fold_layers(name)} ({type(module).__name__})": None
                for name, module in model.named_modules()
                if module.__dict__.get("forward") is not before.get(module) and not _computes_alone(module)
            }
            if unfit:
                raise UnsupportedError(
                    "use_kernels=True",
                    got=f"kernels in place of {', '.join(unfit)}, which would leave out what ranks communicate",
                    expected="kernels for modules that hold no others",
                    fix="Load the model without use_kernels, or with a kernel_config that names other modules.",
                )
    except BaseException:
        for module, forward in before.items():
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
        for name in attributes:
            model.__dict__.pop(name, None)
        model.__dict__.update(kept)
        raise


def _computes_alone(module: nn.Module) -> bool:
    """True if no module inside `module` has a strategy, and it holds no experts: a kernel may replace its forward."""
    own: TensorParallelLayer | None = module.__dict__.get("tp_strategy")
    inside = (inner for inner in module.modules() if inner is not module)
    return not any("tp_strategy" in inner.__dict__ for inner in inside) and not (own is not None and own.holds_experts)


def check_cache(model: Any, cache: Any) -> None:
    """Raise UnsupportedError if a cache of keys and values has other KV heads than this rank.

    A model within `model` has other names than the splits; the error is then that of the outer one.
    """
    layers, resolution = getattr(cache, "layers", ()), getattr(model, "tp_resolution", None)
    for name, heads in resolution.attention.items() if layers and resolution is not None else ():
        index = getattr(inner(model, name), "layer_idx", None)
        keys = getattr(layers[index], "keys", None) if isinstance(index, int) and index < len(layers) else None
        own = heads.kv.widths[GROUP.of(model).rank]
        if isinstance(keys, Tensor) and keys.ndim == 4 and keys.shape[1] != own and not heads.is_latent:
            raise UnsupportedError(
                "cache, or past_key_values",
                got=f"{keys.shape[1]} KV heads in layer {index} of a {type(cache).__name__}",
                expected=f"{own}, the heads of this rank",
                fix="Let the cache take its shape from its first input, or give early_initialization num_heads="
                "[kv for _, kv in tp_transformers.debug.head_counts(model).values()].",
            )
