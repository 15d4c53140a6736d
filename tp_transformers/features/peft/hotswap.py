"""PEFT's swap of one adapter for another, also of another LoRA rank: on full matrices, which are sharded again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ...patches import Change, Patch, Undo, replace_all
from ...ranks.group import GROUP
from ...strategies import full_tensor
from .shard import full_adapters

_MODULE = "peft.utils.hotswap"


def _swap(original: Callable[..., None], model: Any, state_dict: Any, adapter_name: str, *args: Any, **kw: Any) -> None:
    """`hotswap_adapter_from_state_dict`, which `hotswap_adapter` calls. Collective."""
    full = {name: full_tensor(value) for name, value in state_dict.items()}
    with _on_full_adapters(model, [adapter_name]):
        original(model, full, adapter_name, *args, **kw)


def _pad(original: Callable[..., bool], model: Any, *args: Any, **kw: Any) -> bool:
    """`_pad_lora_weights`; its caller, `prepare_model_for_compiled_hotswap`, may be imported before a load."""
    with _on_full_adapters(model):
        return original(model, *args, **kw)


@contextmanager
def _on_full_adapters(model: Any, names: Collection[str] | None = None) -> Iterator[None]:
    """Run the block on full adapters of a tensor-parallel model, on all ranks or none; leave other models unchanged."""
    group = GROUP.find(model)
    if group is None or group.device_mesh is None:
        yield
        return
    with full_adapters(model, group, names):
        yield


def _install() -> Undo:
    module = sys.modules[_MODULE]
    changes: list[Change] = [(module, "hotswap_adapter_from_state_dict", _swap)]
    if hasattr(module, "prepare_model_for_compiled_hotswap"):
        changes.append((module, "_pad_lora_weights", _pad))
    return replace_all(changes)


def _reject_swaps() -> Undo:
    """Reject tensor-parallel models in functions that would swap shards for full matrices."""
    module = sys.modules[_MODULE]
    names = ("hotswap_adapter", "hotswap_adapter_from_state_dict", "prepare_model_for_compiled_hotswap")
    reject = HOT_SWAPS.refusing(lambda model, *_, **__: GROUP.find(model) is not None)
    return replace_all((module, name, reject) for name in names if hasattr(module, name))


HOT_SWAPS = Patch("peft", "swaps of adapters", _install, module=_MODULE, without=_reject_swaps)
"""Makes swaps of adapters work on full matrices, and shards them again."""
