"""This rank's shard of one parameter: its layout, its DTensor form, and the gather of the unsharded tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import UnsupportedError
from ...marks import Mark
from ...ranks import direct
from ...ranks.collectives import copy_shared, copy_to_region
from ...ranks.group import TP_AXIS, TensorParallelGroup
from ...seams import together
from ...slices.layout import Layout, Range, Shared, chunked
from ..forward.block import local_view
from .gather import on_all, on_first
from .slicing import take
from .tensors import HAS_LOCAL, ShardDTensor, ShardTensor, as_shard, own_values


@dataclass(frozen=True, eq=False)
class ParamShard:
    """This rank's shard of a parameter of `shape`; `layout=None` if it is replicated."""

    shape: torch.Size
    layout: Layout | None
    group: TensorParallelGroup
    use_dtensor: bool = True
    sums_gradients: bool = False
    """True if the gradient of a replicated parameter is a partial sum on each rank."""
    added_once: bool = False
    """True if only rank 0 computes with it, since outputs are summed over the ranks; other ranks see zeros."""
    keeps_order: bool = False
    """True if the norm of gradients has to be computed in the order of one process."""
    resharded_over: dist.ProcessGroup | None = None
    """Process group over which a feature shards this rank's shard again, along dim 0; None for none.
    It may be the tensor-parallel group, if each rank has its own batch; the parameter is then replicated in it."""
    _shared: tuple[tuple[Shared, ...], int] = field(init=False)
    """Indices that this rank and others hold; number of indices that several ranks hold, the same on all ranks."""

    def __post_init__(self) -> None:
        # Here and not in the first forward, which torch.compile may trace.
        split = None if self.layout is None else self.layout.split
        shared = ((), 0) if split is None else (split.shared(self.group.rank), split.shared_length)
        object.__setattr__(self, "_shared", shared)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamShard:
        return self

    @property
    def is_over_copies(self) -> bool:
        """True if it is sharded again over copies of the model, not over the tensor-parallel ranks of one copy."""
        return self.resharded_over is not None and self.resharded_over != self.group.process_group

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return tuple(self.shape) if self.layout is None else self.layout.local_shape(self.shape, self.group.rank)

    @cached_property
    def placement(self) -> Shard | Replicate | None:
        """The DTensor placement that describes the layout exactly; None if there is none."""
        if self.group.device_mesh is None or not self.use_dtensor:
            return None
        if self.layout is None:
            return Replicate()
        return Shard(self.layout.dim) if self.layout.split.is_chunked else None

    @property
    def position(self) -> dict[str, Any]:
        """The rank and indices of the shard, in the types that `torch.load(weights_only=True)` allows."""
        layout, rank = self.layout, self.group.rank
        indices = None if layout is None else (layout.dim, layout.split.ranges[rank])
        return {"rank": rank, "size": self.group.size, "indices": (tuple(self.shape), indices, tuple(self.rows))}

    def wrap(self, local: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Make the parameter from this rank's values: a DTensor if a placement describes it, else plain.

        A sharded one gets a class that computes as the full parameter; see `tensors`. Without a process group the shard
        is the full parameter.
        """
        is_sharded = self.layout is not None and self.group.device_mesh is not None
        if self.placement is None and not (is_sharded and type(local) in (Tensor, nn.Parameter)):
            full = nn.Parameter(local, requires_grad=requires_grad)
            SHARD.put(full, self)
            return full
        param: Any = local.detach()
        kind: type = ShardTensor
        if self.placement is not None:
            layout: Any = {"shape": self.shape, "stride": torch.empty(self.shape, device="meta").stride()}
            param = DTensor.from_local(param, self.group.device_mesh, [self.placement], run_check=False, **layout)
            kind = ShardDTensor if is_sharded else DTensor
        # nn.Parameter sets this, too, but detaches first: 5 ms for every new shape in DTensor's dispatch.
        param._is_param = True
        return as_shard(param.requires_grad_(requires_grad), kind, self)  # type: ignore[no-any-return]

    @property
    def needs_view(self) -> bool:
        """True if a local forward does not compute with the parameter itself."""
        return self.layout is not None or self.placement is not None or self.routes_gradient

    @property
    def routes_gradient(self) -> bool:
        """True if the backward sums the gradient of this rank's shard over ranks, or only rank 0 computes with it."""
        return self.sums_gradients or self.added_once or self._shared[1] > 0

    def view(self, param: Tensor) -> Tensor:
        """The local tensor of the local forward; its backward sums gradients as the layout needs.

        The gradient of indices that several ranks hold is summed over those ranks (all-reduce in the backward), so that
        each has the full gradient. All ranks of the axis take part, also those that share no indices.
        """
        if self.is_full(param):
            param = own_values(param, self)
        local = local_view(param)
        if torch.is_grad_enabled() and self.routes_gradient and self.group.process_group is not None:
            process_group, dtype = self.group.process_group, self.group.reduce_dtype
            if self.layout is None:
                local = copy_to_region(local, process_group, dtype)
            else:
                local = copy_shared(local, *self._shared, process_group, dtype, dim=self.layout.dim)
        if self.added_once and self.group.rank:
            return local.where(torch.zeros_like(local, dtype=torch.bool), 0)  # 0 even in place of an infinite value
        return local

    def is_full(self, tensor: Tensor) -> bool:
        """True if `tensor` is an ordinary tensor of the full shape, which a user set in place of the shard."""
        return (
            self.layout is not None
            and not isinstance(tensor, HAS_LOCAL)
            and tuple(tensor.shape) == tuple(self.shape) != self.local_shape
        )

    def full(self, local: Tensor) -> Tensor:
        """Gather the full tensor on every rank (all-gathers) from each rank's `local` values."""
        process_group, joined = self.group.process_group, self.joined(local)
        if self.layout is None or process_group is None:
            return local.clone() if joined is local else joined
        with together(self.group):
            return on_all(joined, self.shape, self.layout, process_group, self.group.device)

    def own(self, full: Tensor) -> Tensor:
        """This rank's shard of `full`, a tensor of the unsharded shape: a view, or a copy of several slices."""
        return take(full, self.layout, self.group.rank)

    def gather(self, local: Tensor) -> Tensor | None:
        """Gather the full tensor on the CPU of rank 0 alone, that of the first copy; None on other ranks."""
        return on_first(local, self.shape, self.layout, self.group.process_group, self.group.device)

    def any_rank(self, value: bool) -> bool:
        """True if `value` is True on any rank that holds a shard of the parameter. Collective over these ranks."""
        has = torch.tensor([float(value)], device=self.group.device)
        for process_group in (self.group.process_group if self.layout is not None else None, self.resharded_over):
            direct.all_reduce(has, process_group, direct.MAX)
        return bool(has)

    def joined(self, local: Tensor) -> Tensor:
        """This rank's shard, from its part that `resharded_over` leaves on this rank. Collective over these ranks."""
        return local

    @property
    def rows(self) -> Range:
        """Range of indices of dim 0 of this rank's shard that are on this rank: all, or those of its part."""
        return 0, self.local_shape[0]


SHARD: Mark[ParamShard] = Mark("tp_shard")
"""This rank's shard of a parameter, on the parameter."""


def shard_of(tensor: Tensor | None) -> ParamShard | None:
    """This rank's shard of a parameter; None if it is not known to be distributed over a `tp` axis.

    A parameter that was loaded with a plan has it as an attribute. For a DTensor over that axis alone, its placement
    defines the shard: the result of torch's parallelize_module on some modules, or of `model.to(dtype)`.
    """
    shard: ParamShard | None = getattr(tensor, "tp_shard", None)
    if shard is not None or not isinstance(tensor, DTensor) or tensor.device_mesh.ndim > 1:
        return shard
    mesh, (placement,) = tensor.device_mesh, tensor.placements
    if mesh.mesh_dim_names not in (None, (TP_AXIS,)) or type(placement) not in (Shard, Replicate):
        return None
    group, layout = TensorParallelGroup.of_mesh(mesh, tensor.device), None
    if isinstance(placement, Shard):
        layout = Layout(placement.dim, chunked(tensor.shape[placement.dim], group.size))
    return ParamShard(tensor.shape, layout, group)


def finish_gradient(param: Tensor) -> Tensor | None:
    """Redistribute a parameter's gradient to the parameter's placements, and return it; None if there is none.

    Collective over the `tp` axis. DTensors may leave a gradient as an operation returned it: partial sums, or full
    values of sharded dims.
    """
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        shard: ParamShard | None = getattr(param, "tp_shard", None)
        dtype = (shard.group.reduce_dtype if shard is not None else None) or grad.dtype
        unreduced: DTensor = grad.to(dtype)  # type: ignore[assignment]
        param.grad = grad = unreduced.redistribute(placements=param.placements).to(grad.dtype)
    return grad


_ITSELF: Any = object()
"""The default of `full_tensor`'s `value`, since a gradient may be None."""


@overload
def full_tensor(param: Tensor) -> Tensor: ...
@overload
def full_tensor(param: Tensor, value: Tensor) -> Tensor: ...
@overload
def full_tensor(param: Tensor, value: Tensor | None) -> Tensor | None: ...
def full_tensor(param: Tensor, value: Tensor | None = _ITSELF) -> Tensor | None:
    """Gather a tensor-parallel parameter on every rank. Collective over the `tp` axis.

    Args:
        param: a parameter of a model loaded with `tp_plan` (DTensor or plain); any other tensor is copied.
        value: a tensor with the layout of `param` to gather instead, such as `param.grad` or an optimizer state. None
            on one rank counts as zeros if other ranks pass a tensor: its experts got no token.

    Returns:
        A new plain tensor of the unsharded shape, on the parameter's device, without autograd history. None if every
        rank passes None as `value`, as `param.grad` is before a backward.

    Raises UnsupportedError on a tensor without values, such as the placeholder of a packed weight.
    """
    shard = shard_of(param)
    tensor = param if value is _ITSELF else value
    if tensor is not None and tensor.is_meta:
        raise UnsupportedError(
            "full_tensor",
            got="a tensor without values: a packed weight, or one on the meta device",
            expected="one with values",
            fix="Load the model with tp_dequantize=True.",
        )
    if value is not _ITSELF and shard is not None and not shard.any_rank(value is not None):
        return None
    if tensor is None:
        if shard is None:
            return None
        tensor = torch.zeros_like(param)
    is_elsewhere = isinstance(tensor, DTensor) and isinstance(param, DTensor) and tensor.placements != param.placements
    if shard is not None and not is_elsewhere:
        return shard.full(local_tensor(tensor))
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter, gradient or DTensor: a plain tensor that shares its memory, detached.

    A file of the shard does not say whose it is: save `model.state_dict()`, whose values carry rank and indices.
    """
    return tensor._local_tensor.detach() if isinstance(tensor, HAS_LOCAL) else tensor.detach()


def unsharded_like(tensor: Tensor) -> Tensor:
    """A meta tensor of the unsharded shape of a parameter or buffer."""
    shard = shard_of(tensor)
    shape = shard.shape if shard is not None else tensor.shape
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def layout_of(tensor: Tensor) -> Layout | None:
    """The layout of a parameter or buffer; None if it is replicated."""
    shard = shard_of(tensor)
    return shard.layout if shard is not None else None
