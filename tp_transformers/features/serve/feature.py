"""Serving: continuous batching, `tp-transformers serve` and `tp-transformers chat`."""

from __future__ import annotations

from ...seams import Feature


class Serve(Feature):
    """transformers' OpenAI-compatible server on N ranks, and a chat in the terminal with one."""

    requires = ("command_line", "run", "shares", "watch")
    commands = {"serve": ".command", "chat": ".chat"}
    model_patches = (".continuous_batching.OWN_CACHE",)


FEATURE = Serve()
