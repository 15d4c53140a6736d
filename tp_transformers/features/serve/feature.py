"""Serving: continuous batching, `tp-transformers serve` and `tp-transformers chat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...patches import Patch


class Serve(Feature):
    """transformers' OpenAI-compatible server on N ranks, and a chat in the terminal with one."""

    requires = ("command_line", "run", "shares", "watch")

    def commands(self) -> Mapping[str, ModuleType]:
        from . import chat, command

        return {"serve": command, "chat": chat}

    def model_patches(self) -> Sequence[Patch]:
        from .continuous_batching import OWN_CACHE

        return (OWN_CACHE,)


FEATURE = Serve()
