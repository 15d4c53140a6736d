"""Strategies of other libraries: torch's parallel styles, and strategies in the form of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...seams import Feature

if TYPE_CHECKING:
    from ...strategies import TensorParallelLayer


class ForeignStyles(Feature):
    """Plans hold styles of `torch.distributed.tensor.parallel`, and names that are registered with transformers."""

    clients = (".registration.REGISTRATION",)

    def strategy_of(self, value: Any) -> TensorParallelLayer | None:
        from .adapting import adapted, registered

        return registered(value) if isinstance(value, str) else adapted(value)

    def strategy_hint(self, name: str) -> str:
        from .adapting import style_hint

        return style_hint(name)


FEATURE = ForeignStyles()
