"""The Hub: reading without a download, `from_pretrained(name, tp_plan="auto", tp_stream=True)`, and uploads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UnsupportedError
from ...seams import Feature, Option


class Stream(Option):
    """True: read weights from the Hub without a download. None: as TP_TRANSFORMERS_STREAM is set."""

    name = "stream"

    def check(self, value: Any, arguments: Mapping[str, Any]) -> None:
        super().check(value, arguments)
        if value and arguments.get("gguf_file") is not None:
            fix = "Leave out tp_stream: one rank of each node downloads the file, each reads its slices."
            got = "both tp_stream=True and gguf_file"
            raise UnsupportedError("from_pretrained", got=got, expected="one of them", fix=fix)


class HubStreaming(Feature):
    """Weights on the Hub without a download: each byte is fetched once, by one rank; rank 0 uploads what all saved."""

    options = (Stream(),)
    storages = (".hub.HubFiles",)
    model_methods = (".push.PushedModel",)


FEATURE = HubStreaming()
