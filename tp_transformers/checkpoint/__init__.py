"""Checkpoints: from files or the Hub into parameters (reading, hub, conversion, quantization), and back (saving)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..namespaces import lazy_names

if TYPE_CHECKING:
    from ..features.presharded.checkpoint import verify_sharded
    from .reading.distributed import load_distributed_checkpoint
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "reading.distributed": "load_distributed_checkpoint",
        },
    )

__all__ = ["load_distributed_checkpoint", "verify_sharded"]
