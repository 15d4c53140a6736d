"""`generate`, in which all ranks have the same inputs, so that no batch is gathered."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

SAME_INPUTS: ContextVar[bool] = ContextVar("tp_transformers_same_inputs", default=False)
"""True while all ranks of a model have the same inputs."""
_Model: Any = object
"""Base of the mixin; in the class of a model, a PreTrainedModel follows it in the MRO."""


class BatchModel(_Model):
    """The method of a loaded model that gives all ranks the same inputs."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        token = SAME_INPUTS.set(True)
        try:
            return super()._generate(*args, **kwargs)
        finally:
            SAME_INPUTS.reset(token)
