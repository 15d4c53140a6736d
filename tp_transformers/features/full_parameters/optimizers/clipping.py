"""torch's `clip_grad_norm_` on shards; unpatched, each rank would scale its gradients by another norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ....model.clip import clip_grad_norm_
from ....patches import Patch, replace_all
from ....strategies import SHARD


def _clip(
    original: Callable[..., Tensor], parameters: Tensor | Iterable[Tensor], *args: Any, **keywords: Any
) -> Tensor:
    """`original`, torch's function, except for parameters of a tensor-parallel model."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    ours = any(SHARD.find(param) is not None for param in params)
    return clip_grad_norm_(params, *args, **keywords) if ours else original(params, *args, **keywords)


FULL_NORMS = Patch(
    "torch",
    "nn.utils.clip_grad_norm_",
    lambda: replace_all((owner, "clip_grad_norm_", _clip) for owner in (nn.utils, nn.utils.clip_grad)),
)
"""Makes `torch.nn.utils.clip_grad_norm_`, and so accelerate's, clip by the norm of the full tensor-parallel model."""
