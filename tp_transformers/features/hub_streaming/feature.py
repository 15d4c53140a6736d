"""Reading from the Hub: `from_pretrained(name, tp_plan="auto", tp_stream=True)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...loading.storage import Storage


class HubStreaming(Feature):
    """Weights on the Hub without a download: each byte is fetched once, by one rank."""

    def storages(self) -> Sequence[type[Storage]]:
        from .storage import HubFiles

        return (HubFiles,)


FEATURE = HubStreaming()
