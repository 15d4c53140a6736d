"""Continuous batching on all ranks, with settings of sampling for each request."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching import cb_logits_processors as processors
from transformers.generation.continuous_batching import model_runner

from ...errors import UnsupportedError
from ..shares.measures import free_memory

CPU_MEMORY = 0.1
"""Fraction of the free CPU memory for the caches of all ranks together; by default, each rank would take all."""
CPU_TOKENS = 256
"""Most tokens of a batch on a CPU: longer prompts are split, and other requests go on in the same batches."""


class Greedy(processors.ContinuousBatchingLogitsProcessor):
    """Leaves only the most likely token of the requests that do not sample."""

    supported_kwargs: ClassVar[dict[str, type]] = {"is_greedy": bool}
    ignored_kwargs: ClassVar[tuple[str, ...]] = ()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Sample."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """(requests,) 1 for a request that does not sample."""
        given = [request.state.logit_processor_kwargs.get("is_greedy", False) for request in requests_with_new_token]
        return torch.tensor(given, dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """`scores`: (requests, vocabulary)."""
        others = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, scores.argmax(-1, keepdim=True), False)
        return scores.masked_fill(others & tensor_arg[: len(scores), None].bool(), -torch.inf)


class TopK(processors.ContinuousBatchingTopKLogitsWarper):
    """transformers' processor, which on a CPU sorts the vocabulary only if a request has a `top_k`."""

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        is_idle = scores.is_cpu and bool((tensor_arg[: len(scores)] >= scores.shape[-1]).all())
        return scores if is_idle else super().__call__(scores, tensor_arg)


class TopP(processors.ContinuousBatchingTopPLogitsWarper):
    """transformers' processor, which on a CPU sorts the vocabulary only if a request has a `top_p`."""

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        is_idle = scores.is_cpu and bool((tensor_arg[: len(scores)].view(torch.float32) >= 1).all())
        return scores if is_idle else super().__call__(scores, tensor_arg)


def start_batches(model: Any, options: Mapping[str, Any], silence: float) -> tuple[Any, int]:
    """Start continuous batching on this rank; returns its manager, and the most tokens that one request can have.

    Arguments and errors: as `make_batches` and `check_caches`.
    """
    manager = make_batches(model, options, silence)
    manager.start()
    while manager.batch_processor is None and manager.is_running():
        manager._generation_thread.join(0.01)
    return manager, check_caches(model, manager)


def make_batches(model: Any, options: Mapping[str, Any], silence: float) -> Any:
    """The manager of continuous batching on this rank, which has not started. Collective.

    Args:
        model: the model. options: of `transformers serve`; `cb_num_blocks` and others are those of the caches.
        silence: seconds that ranks wait for one another between two steps, as in a step if the other's process exists.
    """
    given = {name.removeprefix("cb_"): value for name, value in options.items() if name.startswith("cb_")}
    given = {name: value for name, value in given.items() if value is not None}
    if hasattr(ContinuousBatchingConfig, "cpu_group_timeout"):  # of a group that transformers makes by itself
        given["cpu_group_timeout"] = silence
    if model.device.type == "cpu":
        tokens = given.setdefault("max_batch_tokens", CPU_TOKENS)
        given["max_requests_per_batch"] = tokens
        if "num_blocks" not in given:  # transformers counts the memory of the machine, not of the container
            share = CPU_MEMORY * free_memory(model.device, model.tp_size)
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            given.setdefault("max_memory_percent", share / total)
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=True, temperature=None, top_k=None, top_p=None)
    manager = model.init_continuous_batching(
        generation_config=config, continuous_batching_config=ContinuousBatchingConfig(**given)
    )
    listed = manager.logit_processor
    per_request = [
        Greedy(),
        processors.ContinuousBatchingTemperatureLogitsWarper(TemperatureLogitsWarper(1.0)),
        TopK(TopKLogitsWarper(top_k=torch.iinfo(torch.int32).max)),
        TopP(TopPLogitsWarper(top_p=1.0)),
    ]
    listed.logits_processor.extend(per_request)
    listed.tensors_required, listed.do_processing = len(per_request), True
    listed._retrieve_processors_kwargs()
    return manager


def check_caches(model: Any, manager: Any) -> int:
    """The most tokens that one request can have in the caches. Collective.

    Raises UnsupportedError on all ranks if the caches do not fit the memory.
    """
    with model.tp_group.agree():
        if manager.batch_processor is None:
            raise UnsupportedError(
                "caches of continuous batching",
                got=str(manager.background_thread_status.fatal_error),
                expected="caches that fit the memory",
                fix="Give --cb-num-blocks or --cb-max-memory-percent.",
            )
    return room_of(manager.batch_processor.cache)


def room_of(cache: Any) -> int:
    """Most tokens of one request in an empty cache."""
    if not hasattr(model_runner, "infer_max_single_request_tokens"):  # older releases of transformers
        return int(cache.num_blocks * cache.block_size)
    return int(model_runner.infer_max_single_request_tokens(cache))
