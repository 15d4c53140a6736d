"""Calls that ranks cannot compute: inside of a transform of torch.func, and with a cache of other heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...anatomy import cache_in, inner
from ...errors import UnsupportedError
from ...ranks.direct import refuse_transforms
from ...ranks.group import GROUP, TensorParallelGroup
from ...seams import Mixin


class CheckedModel(Mixin):
    """Methods of a loaded model that refuse such calls."""

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

    def _generate(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        check_cache(self, cache_in(kwargs))
        return super()._generate(own, *args, **kwargs)


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
