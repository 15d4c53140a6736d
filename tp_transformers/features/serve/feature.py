"""Serving: `tp-transformers serve` and `tp-transformers chat`."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from ...seams import Feature


class Serve(Feature):
    """transformers' OpenAI-compatible server on N ranks, and a chat in the terminal with one."""

    requires = ("shares", "watch")

    def commands(self) -> Mapping[str, ModuleType]:
        from . import chat, command

        return {"serve": command, "chat": chat}


FEATURE = Serve()
