"""PEFT's swap of one adapter for another, also of another LoRA rank: on full matrices, which are cut again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ...marks import untyped
from ...patches import Patch, Undo, all_of, replace, when_imported
from ...ranks.group import GROUP
from ...strategies import full_tensor
from .cut import whole_adapters

_MODULE = "peft.utils.hotswap"


def _swap(original: Callable[..., None], model: Any, state_dict: Any, adapter_name: str, *args: Any, **kw: Any) -> None:
    """`hotswap_adapter_from_state_dict`, which `hotswap_adapter` calls; every rank has to call it."""
    whole = {name: full_tensor(value) for name, value in state_dict.items()}
    with _on_whole(model, [adapter_name]):
        original(model, whole, adapter_name, *args, **kw)


def _pad(original: Callable[..., bool], model: Any, *args: Any, **kw: Any) -> bool:
    """What `prepare_model_for_compiled_hotswap` pads with; scripts import that before a model is loaded."""
    with _on_whole(model):
        return original(model, *args, **kw)


@contextmanager
def _on_whole(model: Any, names: Collection[str] | None = None) -> Iterator[None]:
    """Run the block on whole adapters of a tensor-parallel model, on all ranks or on none; on any other as it is."""
    group = GROUP.find(model)
    if group is None or group.device_mesh is None:
        yield
        return
    with whole_adapters(model, group, names), group.agree():
        yield


def _install() -> Undo:
    module, ways = sys.modules[_MODULE], [("hotswap_adapter_from_state_dict", _swap), ("_pad_lora_weights", _pad)]
    return all_of(replace(module, name, untyped(way)) for name, way in ways if hasattr(module, name))


HOT_SWAPS = Patch("peft", "hotswap_adapter", lambda: when_imported(_MODULE, _install))
"""Adapters that are swapped are cut."""
