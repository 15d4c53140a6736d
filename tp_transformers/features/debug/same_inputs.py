"""`check_inputs`: raise MeshError if ranks that share a model get different batches; nothing else detects that."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ...errors import MeshError, UnsupportedError
from ...model.dropout import generator_of
from ...model.generate import fingerprint
from ...ranks.group import GROUP, agreed, differing
from ...strategies import batch_sharded
from ..places.place import named_inputs

SWITCH = "TP_TRANSFORMERS_DEBUG"
"""Environment variable; unless it is empty or 0, every loaded model is checked."""


def check_inputs(model: PreTrainedModel) -> RemovableHandle:
    """Raise MeshError on all ranks of the `tp` axis if the inputs of a forward of `model` differ between them.

    With different batches, ranks sum partial results of different inputs, and the loss may still go down. The check
    compares a hash of each input before every forward, in one all-gather. In training it also compares the random
    state, which dropouts on replicated activations draw from. It reads all inputs, also from the GPU: use it for
    debugging.

    Returns:
        A handle; its `remove()` ends the check.

    Raises:
        UnsupportedError: the model has no plan, or its ranks have different batches by design.
    """
    group = GROUP.find(model)
    if group is None:
        raise UnsupportedError("check_inputs needs a model that was loaded with tp_plan")
    if any(batch_sharded(model)):
        raise UnsupportedError("check_inputs: with tp_batch_sharded, ranks are given batches of their own")

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = named_inputs(module, args, kwargs)
        if module.training:
            inputs["the random state"] = generator_of(group.device).get_state()
        rank, names = differing(group.gather({name: fingerprint(value) for name, value in inputs.items()}))
        if names:
            raise agreed(
                MeshError(
                    "the inputs of the model",
                    got=f"{', '.join(sorted(names))} on rank {rank} of the tp axis that differ from those on rank 0",
                    expected="the same on all ranks that share the model",
                    fix="Give the sampler the data-parallel rank, DistributedSampler(dataset, num_replicas=dp_size, "
                    "rank=dp_rank), and seed all ranks of the tp axis identically.",
                )
            )

    handle: RemovableHandle = model.register_forward_pre_hook(check, with_kwargs=True)
    return handle


def check_if_enabled(model: PreTrainedModel) -> None:
    """Check the inputs of a loaded model if `SWITCH` is set."""
    if os.environ.get(SWITCH, "0") not in ("", "0") and not any(batch_sharded(model)):
        check_inputs(model)
