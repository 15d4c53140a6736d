"""Kernels of the Hub on a tensor-parallel model: a replaced forward must not skip modules that communicate.

transformers puts a kernel's function in place of a module's forward (`use_kernels=True`). The strategy's work around
that forward stays, and the kernel sees this rank's tensors. But a kernel for a larger block, such as the mixture of
experts of GPT-OSS, reads the parameters of the modules inside it and never calls them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...anatomy import fold_layers
from ...errors import UnsupportedError
from ...marks import untyped
from ...ranks.group import GROUP
from ...strategies import TensorParallelLayer

_Model: Any = object
"""Base of the mixin; in the class of a model, a PreTrainedModel follows it in the MRO."""


class KernelModel(_Model):
    """The method of a loaded model that puts kernels in place of forwards."""

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
