"""Attention of one token on a CPU: query heads that share a key head become rows of one product.

torch's CPU kernel with `enable_gqa` reads the keys of a head once for each of its query heads. transformers' `pack_gqa`
makes rows of these query heads, but only beside an attention mask.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ...patches import Patch, Undo, nothing, replace


def _install() -> Undo:
    from transformers.integrations import sdpa_attention

    if not hasattr(sdpa_attention, "pack_gqa"):  # older than 5.24
        return nothing()
    original = AttentionInterface()["sdpa"]
    packs = False

    @wraps(original)
    def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal packs
        if torch.compiler.is_compiling():
            return original(module, query, *args, **kwargs)
        packs = query.shape[2] == 1 and query.is_cpu
        return original(module, query, *args, **kwargs)

    def uses_gqa(original: Any, *args: Any) -> bool:
        return not packs and original(*args)

    AttentionInterface.register("sdpa", attend)
    restore = replace(sdpa_attention, "use_gqa_in_sdpa", uses_gqa)

    def undo() -> None:
        restore()
        if AttentionInterface()["sdpa"] is attend:
            AttentionInterface.register("sdpa", original)

    return undo


GROUPED_QUERIES = Patch("transformers", "sdpa_attention.use_gqa_in_sdpa", _install)
