"""Checkpoints: from files or the Hub into parameters (reading, hub, conversion, quantization), and back (saving)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..namespaces import lazy_names

if TYPE_CHECKING:
    from ..features.dcp.load import load_distributed_checkpoint
    from ..features.presharded.checkpoint import verify_sharded
else:
    __getattr__, __dir__ = lazy_names(__name__, {})

__all__ = ["load_distributed_checkpoint", "verify_sharded"]
