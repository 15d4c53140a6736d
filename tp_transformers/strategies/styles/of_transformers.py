"""Adapter for strategies written for transformers' interface (5.16 and later): our loading, their forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ...errors import error_text
from ...marks import untyped
from ...ranks.group import TensorParallelGroup
from ..forward.attach import wrap_forward
from ..forward.short_forwards import Forwarder
from ..forward.views import still_sharded
from ..shards.shard import ParamShard
from ..shards.trace import meta_mesh
from ..signature import ANY, FEATURES, PARTIAL, Signature, only, state_of
from .style import StyleParallel

_CONTRACT = ("shard_param", "transform_inputs_pre_forward", "transform_output_post_forward", "install_forward")


class TransformersStyleParallel(StyleParallel):
    """A strategy that inherits from transformers' `TensorParallelLayer`. Its `shard_param` is called with meta tensors
    to find placements, and `install_forward` wraps the module's forward in its transforms.

        x ── transform_inputs_pre_forward ── module of DTensors ── transform_output_post_forward ── y
    """

    owner = "transformers'"

    def __init__(self, style: Any) -> None:
        """`style`: an instance, shared by all modules as in transformers."""
        self.style = style
        super().__init__(
            input_layouts=getattr(style, "input_layouts", None),
            output_layouts=getattr(style, "output_layouts", None),
            use_local_output=getattr(style, "use_local_output", True),
        )
        is_rowwise = state_of(only(self.input_layouts)) is FEATURES
        self.signature = Signature(
            FEATURES if is_rowwise else ANY,
            FEATURES if state_of(only(self.output_layouts)) is FEATURES else ANY,
            inside=(FEATURES, PARTIAL) if is_rowwise else None,
        )
        self.placements: Mapping[str, Placement] = {}
        self.problem = ""

    def bind(self, module: nn.Module, size: int, **options: Any) -> TransformersStyleParallel:
        bound = super().bind(module, size, **options)
        assert isinstance(bound, TransformersStyleParallel)
        try:
            bound.placements, bound.problem = _placed(self.style, module, size, bound.name), ""
        except Exception as error:
            bound.placements, bound.problem = {}, f"{self.shown} does not fit it: {error_text(error)}"
        return bound

    def check(self, module: nn.Module) -> None:
        """Raise ValueError if the style raised on meta tensors (see `bind`), or was given parts, a unit or widths."""
        if self.problem:
            raise ValueError(self.problem)
        if self.unit is not None or self.widths or self.parts is not None:
            raise ValueError(f"{self.shown} takes no parts, no unit and no widths")

    @property
    def is_built_in(self) -> bool:
        """False: its layouts may not describe all of its communication."""
        return False

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        placement = self.placements.get(param_type)
        return placement.dim if isinstance(placement, Shard) else None

    def shard(self, param_type: str, shape: torch.Size, group: TensorParallelGroup) -> ParamShard:
        """See `TensorParallelLayer.shard`: a DTensor if the style makes one, else a plain tensor."""
        return replace(super().shard(param_type, shape, group), use_dtensor=param_type in self.placements)

    def views_of(self, module: nn.Module, views: Mapping[str, ParamShard]) -> Iterable[str]:
        """See `Communication.views_of`; transformers' `context_around_forward` replaces DTensors."""
        return still_sharded(module, views)

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Let the style install its forward at the first call, and again at the first call of a deep copy."""
        style = self.style

        def around(call: Forwarder) -> Forwarder:
            def forward(mod: Any, *args: Any, **kwargs: Any) -> Any:
                of, installed = vars(mod).get("tp_installed", (0, None))
                if of != id(mod):
                    installed = _installed(style, mod, call, mesh)
                    mod.tp_installed = (id(mod), installed)
                return installed(*args, **kwargs)

            return forward

        wrap_forward(module, around)

    def __repr__(self) -> str:
        return f"transformers.{type(self.style).__name__}()"


def is_transformers_style(value: Any) -> bool:
    """True for an instance of transformers' `TensorParallelLayer` (5.16 and later)."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in _CONTRACT)


def _placed(style: Any, module: nn.Module, size: int, name: str) -> dict[str, Placement]:
    """Run the style on meta tensors; return {parameter: placement}, without parameters that it leaves plain."""
    mesh, meta_module = meta_mesh(0, size), copy.copy(module)
    meta_params = {
        key: nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        for key, param in module._parameters.items()
        if param is not None
    }
    dicts = {key: copy.copy(value) for key, value in vars(module).items() if isinstance(value, dict)}  # hooks, ...
    vars(meta_module).update(dicts, _parameters={**module._parameters, **meta_params})
    for key in meta_params:
        if hasattr(style, "validate_param"):
            style.validate_param(meta_module, key, mesh, parameter_name=f"{name}.{key}")
        style.shard_param(meta_module, key, mesh)
    parameters: dict[str, Any] = dict(meta_module._parameters)
    placements: dict[str, Placement] = {
        key: param.placements[0] for key, param in parameters.items() if isinstance(param, DTensor)
    }
    style.install_forward(meta_module, mesh)
    if any(meta_module._parameters.get(key) is not param for key, param in parameters.items()):
        raise ValueError("install_forward replaces parameters, which is for shard_param to do")
    for key, placement in placements.items():
        if type(placement) not in (Shard, Replicate):
            raise ValueError(f"shard_param places {key} as {placement}, where Shard and Replicate can be loaded")
    return placements


def _installed(style: Any, module: Any, call: Forwarder, mesh: DeviceMesh) -> Callable[..., Any]:
    """Return `call` wrapped in the style's transforms; `module.forward` itself is restored."""
    forward = vars(module)["forward"]
    untyped(module).forward = MethodType(call, module)
    try:
        style.install_forward(module, mesh)
        return vars(module)["forward"]  # type: ignore[no-any-return]
    finally:
        untyped(module).forward = forward
