"""Adapter for strategies with `partition_tensor` that do not inherit from our base class."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...strategies.base import TensorParallelLayer
from ...strategies.forward.communication import as_inputs


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
