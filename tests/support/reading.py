"""A part of a checkpoint for the tests of the reader, beside their fixture `big`."""

from __future__ import annotations

import torch

from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.checkpoint.reading.jobs import Request
from tp_transformers.slices.stored import Stored


def columns(checkpoint: Checkpoint) -> Request:
    """The right half of every row."""
    tensor = checkpoint.tensors["x"].select(1, [(2048, 4096)])
    assert isinstance(tensor, Stored)
    return Request(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))
