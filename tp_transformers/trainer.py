"""transformers' Trainer for tensor-parallel models: `from tp_transformers.trainer import Trainer`."""

from .features.trainer.trainer import Trainer

__all__ = ["Trainer"]
