"""Patches of nnsight. What they call is imported once nnsight is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ...patches import Patch, Undo, nothing, replace, replace_all

_MODULE, _LOADER = "nnsight.intervention.interleaver", "nnsight.modeling.huggingface"


def _install() -> Undo:
    from nnsight.intervention.envoy import Envoy

    from .nnsight import call_envoy, instrument

    return replace_all([(sys.modules[_MODULE].Interleaver, "instrument", instrument), (Envoy, "__call__", call_envoy)])


def _check_ranks(original: Callable[..., None], model: Any, name: str, arguments: Any) -> None:
    """`HuggingFaceModel._refuse_impossible_tp`: our load takes heads that ranks do not divide."""
    if arguments.get("tp_plan") is None:
        original(model, name, arguments)


FULL_ACTIVATIONS = Patch("nnsight", "activations that it shows", _install, module=_MODULE, without=nothing)
"""Makes nnsight gather activations by our strategies, and shard them again after an edit."""

ANY_RANKS = Patch(
    "nnsight",
    "HuggingFaceModel._refuse_impossible_tp",
    lambda: replace(sys.modules[_LOADER].HuggingFaceModel, "_refuse_impossible_tp", _check_ranks),
    module=_LOADER,
    without=nothing,
)
"""Held by `enable()`: nnsight loads a model by its name and a `tp_plan` on any number of ranks."""
