"""Blocks that compute on the whole of what every rank has a part of, along the sequence or along the batch.

parts ── whole ── [ block ] ── parts
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..collectives import (
    Group,
    copy_to_region,
    gather_from_region,
    gather_to_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
)
from ..errors import PlanError
from .base import Placements, TensorParallelLayer
from .local import to_local
from .regather import saving_part

Widths = tuple[int, ...]
"""The length of every rank's part."""


class RegionBlock(TensorParallelLayer):
    """A block that computes on the whole, between modules that compute on parts."""

    dim: int
    """Along which ranks have parts of activations: (batch, sequence, hidden)."""

    def parts_of(self, x: Tensor, mesh: DeviceMesh) -> Widths | None:
        """How what `x` is a part of is cut; None where it is whole already."""
        raise NotImplementedError

    def rows_of(self, x: Tensor, widths: Widths) -> Tensor:
        """An output with all tokens of the batch in a row, (tokens, features), as (batch, sequence, features)."""
        raise NotImplementedError

    def misfit(self, what: str, x: Tensor, length: int) -> PlanError:
        """That `what` is not of `length` along `dim`."""
        raise NotImplementedError

    def join(self, x: Tensor, widths: Widths, group: Group) -> Tensor:
        """The whole of this rank's part `x`."""
        raise NotImplementedError

    def enter(self, x: Tensor, widths: Widths | None, group: Group) -> Tensor:
        """The whole of this rank's part `x`, or of `x` if it is whole already (`widths` is None)."""
        raise NotImplementedError

    def leave(self, x: Tensor, widths: Widths | None, group: Group) -> Tensor:
        """This rank's part of the block's output, or the whole of it where `widths` is None."""
        raise NotImplementedError

    def stop(self) -> None:
        """End what `enter` began."""

    def interrupted(self, module: nn.Module) -> None:
        """See `TensorParallelLayer.interrupted`."""
        module.tp_strategy.stop()  # type: ignore[operator,union-attr]

    @property
    def around_whole(self) -> RegionBlock:
        """What stands around the block where nothing in it is cut after all."""
        return self

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        (x, *others), strategy = to_local(inputs), mod.tp_strategy
        assert isinstance(strategy, RegionBlock)
        strategy.widths_now = widths = strategy.parts_of(x, device_mesh)
        if widths is not None and x.shape[strategy.dim] != widths[device_mesh.get_local_rank()]:
            raise strategy.misfit("an input", x, widths[device_mesh.get_local_rank()])
        return (strategy.enter(x, widths, device_mesh.get_group()), *others)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        strategy = mod.tp_strategy
        assert isinstance(strategy, RegionBlock)
        strategy.stop()
        widths = strategy.widths_now
        x, *others = (outputs,) if isinstance(outputs, Tensor) else outputs
        if widths is not None and x.ndim == 2:
            x = strategy.rows_of(x, widths)
        if widths is not None and (x.ndim <= 2 or x.shape[strategy.dim] != sum(widths)):
            raise strategy.misfit("an output", x, sum(widths))
        x = strategy.leave(x, widths, device_mesh.get_group())
        return x if isinstance(outputs, Tensor) else (x, *others)

    widths_now: Widths | None = None
    """What `parts_of` said of the forward that is under way."""


class GatherMixin(RegionBlock):
    """Around a block that computes locally: gather and scatter what is summed."""

    sums_output = True
    saving: AbstractContextManager[None] | None = None
    """What decides, while the block computes, that its input is gathered again for the backward rather than kept."""

    def join(self, x: Tensor, widths: Widths, group: Group) -> Tensor:
        """See `RegionBlock.join`."""
        return gather_to_region(x, widths, group, dim=self.dim)

    def enter(self, x: Tensor, widths: Widths | None, group: Group) -> Tensor:
        """See `RegionBlock.enter`."""
        if widths is None:
            return copy_to_region(x, group)
        whole = self.join(x, widths, group)
        self.saving = saving_part(x, whole, widths, group, dim=self.dim)
        if self.saving is not None:
            self.saving.__enter__()
        return whole

    def leave(self, x: Tensor, widths: Widths | None, group: Group) -> Tensor:
        """See `RegionBlock.leave`."""
        if widths is None:
            return reduce_from_region(x, group)
        return reduce_scatter_from_region(x, widths, group, dim=self.dim)

    def stop(self) -> None:
        """See `RegionBlock.stop`."""
        if self.saving is not None:
            self.saving.__exit__(None, None, None)
            self.saving = None


class WholeMixin(RegionBlock):
    """Around a block that makes a whole output of a whole input."""

    def join(self, x: Tensor, widths: Widths, group: Group) -> Tensor:
        """See `RegionBlock.join`."""
        return gather_from_region(x, widths, group, dim=self.dim)

    def enter(self, x: Tensor, widths: Widths | None, group: Group) -> Tensor:
        """See `RegionBlock.enter`."""
        return x if widths is None else self.join(x, widths, group)

    def leave(self, x: Tensor, widths: Widths | None, group: Group) -> Tensor:
        """See `RegionBlock.leave`."""
        return x if widths is None else scatter_to_region(x, widths, group, dim=self.dim)
