"""Batches of `tp-transformers serve`: each request has settings of sampling, on all ranks as in one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from tests.features.serve.distributed.test_continuous_batching import NEW, greedy
from tests.support.models import load

pytest.importorskip("transformers.generation.continuous_batching.distributed")
batches = pytest.importorskip("tp_transformers.features.serve.batches")
requests = pytest.importorskip("tp_transformers.features.serve.requests")

PROMPT = [5, 9, 41, 150]
LONG = [token % 190 + 3 for token in range(7, 150)]
"""Longer than a batch."""
OPTIONS = {"cb_num_blocks": 16, "cb_max_batch_tokens": 32}
SETTINGS: list[Mapping[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.9},
    {"do_sample": False},
]


def answered(manager: Any, prompts: list[list[int]], settings: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens of requests that are given at once, after a seed of rank 0."""
    if manager.is_tp_driver:
        torch.manual_seed(5)
        for number, (prompt, kwargs) in enumerate(zip(prompts, settings, strict=True)):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=NEW, **kwargs)
    found: dict[str, list[int]] = {}
    while len(found) < len(prompts):
        output = manager.get_result(timeout=1)
        if output is not None:
            found[output.request_id] = output.generated_tokens
    return [found[key] for key in sorted(found)]


def served(folder: str) -> Any:
    """Run on every rank."""
    model = load(folder)
    model.generation_config.update(max_new_tokens=NEW, pad_token_id=0)
    manager, room = batches.start_batches(model, OPTIONS, 60)
    settings = [requests.sampling(GenerationConfig(**each)) for each in SETTINGS]
    single = [answered(manager, [PROMPT], [each])[0] for each in settings]
    together = answered(manager, [PROMPT, LONG, PROMPT, LONG], settings)
    manager.stop(hard_stop=True)
    return single, [together[0], together[3]], room


def expected_of(folder: str, settings: Mapping[str, Any]) -> list[int]:
    """One request in one process, by transformers alone."""
    manager = AutoModelForCausalLM.from_pretrained(folder).init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=NEW, pad_token_id=0, eos_token_id=-1, **settings),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32),
    )
    manager.start()
    manager.get_result(timeout=0.1)  # it sets a seed of its own as it starts
    found = answered(manager, [PROMPT], [{}])[0]
    manager.stop(hard_stop=True)
    return found


def test_requests_are_sampled_as_each_asks(pool, cases) -> None:
    folder = cases(9, 3).folder
    alone, expected = greedy(folder, [PROMPT, LONG]), [expected_of(folder, each) for each in SETTINGS]
    assert expected[0] == alone[0] != expected[1] != expected[2]
    found = pool.run(2, served, folder)
    assert [single for single, _, _ in found] == [expected] * 2
    assert [together for _, together, _ in found] == [alone] * 2
    assert {room for _, _, room in found} == {16 * ContinuousBatchingConfig().page_size}


def cached(folder: str, free: int) -> int:
    """Bytes of this rank's cache where `free` bytes are free in the container."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "free_memory", lambda device, sharers: free // sharers)
        manager, _ = batches.start_batches(load(folder), {}, 60)
        nbytes = manager.batch_processor.cache.cache_tensor.nbytes
        manager.stop(hard_stop=True)
        return int(nbytes)


def test_caches_are_sized_by_the_free_memory_of_the_container(pool, cases) -> None:
    for size in (1, 2):
        for found in pool.run(size, cached, cases(9, 3).folder, 1 << 30):
            assert 0 < found * size <= 0.1 * (1 << 30)
