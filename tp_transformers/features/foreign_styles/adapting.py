"""Strategies from objects of other libraries, and from names that are registered with transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ...errors import PlanError
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.communication import as_inputs
from ...strategies.registry import STRATEGIES
from .of_torch import OWN_NAMES, SUPPORTED, TorchStyleParallel
from .registration import parallel_styles


class PartitionedStyle(TensorParallelLayer):
    """A strategy in the form of transformers 4.5x's documentation: `partition_tensor` slices parameters; the optional
    `_prepare_input_fn` and `_prepare_output_fn` run around the module's forward.
    """

    def __init__(self, style: Any) -> None:
        """`style`: an instance, shared by all modules as in transformers."""
        self.style = style
        names = ("input_layouts", "output_layouts", "desired_input_layouts", "use_local_output", "use_dtensor")
        super().__init__(**{name: getattr(style, name) for name in names if hasattr(style, name)})

    def partition_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.style.partition_tensor(*args, **kwargs)  # type: ignore[no-any-return]

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        prepare = getattr(type(self.style), "_prepare_input_fn", None)  # from the class: it takes no self
        if prepare is None:
            return inputs
        return as_inputs(prepare(self.input_layouts, self.desired_input_layouts, module, inputs, mesh), inputs)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        prepare = getattr(type(self.style), "_prepare_output_fn", None)
        if prepare is None:
            return outputs
        return prepare(self.output_layouts, self.use_local_output, module, outputs, mesh)

    @property
    def is_built_in(self) -> bool:
        """False: its layouts may not describe all of its communication."""
        return False

    def __repr__(self) -> str:
        return f"{type(self.style).__name__}()"


_UNCALLED = ("shard_param", "shard_tensor", "prepare_module_tp")
"""Methods by which strategies for transformers 5 shard; nothing here calls them."""


def adapted(value: Any) -> TensorParallelLayer | None:
    """Wrap a style of torch, or an object with `partition_tensor`; a strategy is itself, any other value None.

    Raises PlanError for a strategy with methods that would never be called.
    """
    partitions = not isinstance(value, TensorParallelLayer | type) and _is_own(value, "partition_tensor")
    uncalled = [name for name in _UNCALLED if _is_own(value, name)]
    if not (uncalled or partitions or isinstance(value, type)) and hasattr(value, "shard_param"):
        uncalled = ["shard_param"]  # of a class of transformers
    if uncalled:
        raise PlanError(
            f"strategy {type(value).__name__}",
            got=f"{', '.join(uncalled)}, which nothing calls here",
            expected="split_dim or partition_tensor, before and after",
            fix="Inherit from tp_transformers.strategies.TensorParallelLayer, and implement split_dim or "
            "partition_tensor, or take a style of torch.distributed.tensor.parallel.",
        )
    if isinstance(value, TensorParallelLayer):
        return value
    if partitions:
        return PartitionedStyle(value)
    return TorchStyleParallel(value) if isinstance(value, ParallelStyle) else None


def registered(name: str) -> TensorParallelLayer | None:
    """The strategy that the user registered as `name` with transformers' interface; None without one.

    Classes of transformers count only if transformers registers them under a name of ours.
    """
    styles = parallel_styles()
    style = styles.get(name)
    if isinstance(style, type):
        try:
            style = style()
        except TypeError:  # its constructor needs arguments
            return None
    if _is_theirs(type(style)) and type(style) not in {type(styles.get(own)) for own in STRATEGIES}:
        return None
    return adapted(style)


def style_hint(name: str) -> str:
    """Return a hint for a name of another library in place of a strategy's; "" for any other name."""
    name = name.removesuffix("()")
    if name in {style.__name__ for style in SUPPORTED}:
        own_name = f", and ours is called {OWN_NAMES[name]!r}" if name in OWN_NAMES else ""
        return f" (torch's style is an object, {name}(...), which a plan in Python can hold{own_name})"
    style = parallel_styles().get(name)
    if isinstance(style, type):
        return f" (it is registered with transformers as a class; register an object, {style.__name__}(...))"
    if style is not None:
        return (
            " (it is registered with transformers, in a form that nothing calls here; inherit from "
            "tp_transformers.strategies.TensorParallelLayer, and register it with "
            "tp_transformers.strategies.ParallelInterface)"
        )
    return ""


def _is_theirs(cls: type) -> bool:
    return cls.__module__.startswith("transformers.")


def _is_own(value: Any, name: str) -> bool:
    """True if a method is defined in a user's class, not in transformers or this package."""
    module = getattr(getattr(type(value), name, None), "__module__", None) or "transformers."
    return not module.startswith(("transformers.", "tp_transformers."))
