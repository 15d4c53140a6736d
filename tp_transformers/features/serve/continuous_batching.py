"""transformers' continuous batching with a cache of this rank's heads, and the tokens of rank 0 on all ranks."""

from __future__ import annotations

import inspect
import sys
import zlib
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ...errors import MeshError, UnsupportedError
from ...marks import Mark, untyped
from ...patches import Patch, Undo, replace, replace_all
from ...ranks import direct
from ...ranks.group import GROUP, TensorParallelGroup
from ...strategies import LocalConfig

_MODULE = "transformers.generation.continuous_batching.continuous_api"

_kv_heads: ContextVar[int | None] = ContextVar("tp_transformers_kv_heads", default=None)
"""Number of KV heads of this rank, while the cache of a tensor-parallel model is created."""
_CHECKSUMS: Mark[Tensor] = Mark("tp_checksums")
"""Mark on the outputs of asynchronous batches: the checksums of the last step, which the device may still compute."""


def _create_batch_processor(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`ContinuousBatchingManager._create_batch_processor`, which creates the cache."""
    group = GROUP.find(self.model)
    if group is None:
        return original(self, *args, **kwargs)
    token = _kv_heads.set(_own_kv_heads(self.model))
    try:
        processor = original(self, *args, **kwargs)
    finally:
        _kv_heads.reset(token)
    GROUP.put(processor.inputs_and_outputs, group)
    return processor


def _make_cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`PagedAttentionCache.__init__` with this rank's KV heads in its config; it does not divide them again."""
    heads = _kv_heads.get()
    if heads is not None:
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        arguments = bound.arguments
        arguments["config"] = LocalConfig(arguments["config"], num_key_value_heads=heads)
        if "distributed_helper" in arguments:
            arguments["distributed_helper"] = LocalConfig(
                arguments["distributed_helper"], are_kv_heads_tp_ed=lambda: False
            )
        for name, default in (("tp_plan", {}), ("tp_size", None)):  # arguments of older releases
            if name in arguments:
                arguments[name] = default
        args, kwargs = bound.args[1:], bound.kwargs
    original(self, *args, **kwargs)


def _retrieve_device_outputs(original: Any, self: Any) -> None:
    """`retrieve_device_outputs` of the inputs and outputs of a step, with rank 0's tokens on all ranks.

    What only rank 0's process gets, such as the seed of a request to a server, changes the draws of rank 0 alone.
    """
    group = GROUP.find(self)
    if group is not None and group.size > 1:
        with self.compute_stream or nullcontext():
            _take_tokens(self, group)
    original(self)


def _take_tokens(step: Any, group: TensorParallelGroup) -> None:
    """All-reduce rank 0's tokens of a step, and a checksum of what every rank has decoded.

    Raises MeshError on all ranks if the checksums differ; for an asynchronous step, in the next one.
    """
    tokens, pairs = step.output_ids, getattr(step, "io_pairs", None)
    host = step if pairs is None else pairs[step.current_pair].host_io
    requests = [request.state for request in host.requests_in_batch]
    last = [request.generated_tokens[-1:] or request.initial_tokens for request in requests]
    places = [(request.request_id, request.current_len()) for request in requests]
    checksum = zlib.crc32(repr((places, last)).encode()) >> 1
    own = tokens if group.rank == 0 else torch.full_like(tokens, torch.iinfo(tokens.dtype).min)
    sent = torch.cat([own.flatten(), tokens.new_tensor([checksum, -checksum])])
    direct.all_reduce(sent, group.process_group, direct.MAX)
    tokens.copy_(sent[:-2].view_as(tokens))
    checksums = sent[-2:]
    if pairs is not None:
        before = _CHECKSUMS.find(step)
        _CHECKSUMS.put(step, checksums)
        checksums = torch.zeros_like(checksums) if before is None else before
    if checksums.sum() != 0:
        raise MeshError(
            "continuous batching",
            got="other requests or tokens on some ranks",
            expected="the same batches on all ranks of a model",
            fix="Code on one rank alone may give requests to rank 0, but not change them or their tokens.",
        )


def _own_kv_heads(model: Any) -> int | None:
    """KV heads of this rank, the same in every layer; None if attention is not sharded.

    Raises UnsupportedError if layers have different numbers of them.
    """
    rank = model.tp_group.rank
    counts = {heads.kv.widths[rank] for heads in model.tp_resolution.attention.values()}
    if len(counts) > 1:
        raise UnsupportedError(
            "continuous batching",
            got=f"layers with {', '.join(map(str, sorted(counts)))} KV heads on rank {rank}",
            expected="layers that have as many",
            fix="Call generate.",
        )
    return counts.pop() if counts else None


def _install() -> Undo:
    module: Any = sys.modules[_MODULE]
    return replace_all(
        [
            (module.ContinuousBatchingManager, "_create_batch_processor", _create_batch_processor),
            (module.PagedAttentionCache, "__init__", _make_cache),
            (module.ContinuousBatchingIOs, "retrieve_device_outputs", _retrieve_device_outputs),
            (module.ContinuousBatchingAsyncIOs, "retrieve_device_outputs", _retrieve_device_outputs),
        ]
    )


def _reject_managers() -> Undo:
    """Reject a tensor-parallel model in `ContinuousBatchingManager`: its cache would have all heads."""
    manager = untyped(sys.modules[_MODULE]).ContinuousBatchingManager
    return replace(manager, "__init__", OWN_CACHE.refusing(lambda _, model, *__, **___: GROUP.find(model) is not None))


OWN_CACHE = Patch("transformers", "continuous batching", _install, module=_MODULE, without=_reject_managers)
"""Gives the cache of continuous batching this rank's KV heads, and all ranks the tokens of rank 0."""
