"""Inputs that differ between ranks: those of `generate` always raise, those of a forward with `check_inputs`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ...errors import MeshError, UnsupportedError
from ...model.dropout import generator_of
from ...model.generate import OWN
from ...ranks.group import GROUP, agreed, differing
from ...strategies import batch_sharded, local_tensor
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


def hashes_of(model: Any, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Hashes of the arguments of `generate` that all ranks have to give alike, by name."""
    shared = {name: value for name, value in arguments.items() if name not in OWN and value is not None}
    shared["generation_config"] = arguments.get("generation_config") or getattr(model, "generation_config", None)
    return {name: fingerprint(value) for name, value in shared.items()}


def check_arguments(ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise MeshError if arguments of `generate` differ between ranks, by the `hashes_of` each."""
    rank, names = differing(ranks)
    if names:
        raise MeshError(
            f"generate's {', '.join(sorted(names))}",
            got=f"one on rank 0 and another on rank {rank}",
            expected="the same on all ranks of a model",
            fix="Give them all the same prompts and settings; ranks that get different prompts need a model "
            'each: a device_mesh with a "dp" axis beside "tp".',
        )


def fingerprint(value: Any) -> str:
    """A short hash of `value`: of the contents of tensors and plain data, of the type of everything else."""
    return hashlib.blake2b(json.dumps(_plain_data(value), sort_keys=True).encode(), digest_size=16).hexdigest()


def _plain_data(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Tensor):
        data = local_tensor(value).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return [list(value.shape), str(value.dtype), hashlib.blake2b(data).hexdigest()]
    if hasattr(value, "to_dict"):  # a config
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(fingerprint, value))
    if hasattr(value, "get_seq_length"):  # a cache, of this rank's heads
        return [type(value).__name__, _plain_data(value.get_seq_length())]
    return type(value).__name__
