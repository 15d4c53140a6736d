"""Calls that one rank makes alone: it says which rank has not made them, and where that is, instead of hanging."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from tests.support.comparisons import relative
from tests.support.logged import logged
from tests.support.models import PROMPTS, load
from tests.support.tiers import wide
from tp_transformers import (
    RemoteRankError,
    clip_grad_norm_,
    data_parallel,
    full_tensor,
    renew_process_group,
    save_sharded,
)
from tp_transformers.features.watch import waits

PATIENCE = 1.0
"""Seconds in place of those that a rank usually waits before it tells."""

CALLS: dict[str, Callable[[Any, str], Any]] = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "generate": lambda model, _: model.generate(PROMPTS, max_new_tokens=2, do_sample=False),
    "save_sharded": save_sharded,
    "forward": lambda model, _: model(PROMPTS),
    "full_tensor": lambda model, _: full_tensor(model.model.layers[0].mlp.up_proj.weight),
    "clip_grad_norm_": lambda model, _: clip_grad_norm_(model, 1.0),
    "load_state_dict": lambda model, _: model.load_state_dict(model.state_dict()),
    "push_to_hub": lambda model, _: model.push_to_hub("org/model"),
}


@contextmanager
def told() -> Iterator[list[str]]:
    """What this rank is told, after which the others go on."""
    go_on = partial(_get_default_store().set, "told", "")
    with mock.patch.object(waits, "PATIENCE", PATIENCE), logged(waits.__name__, then=go_on) as messages:
        yield messages


def late(folder: str, target: str, name: str) -> tuple[list[str], Any]:
    """Run on every rank: rank 1 is busy with something else until rank 0 says that it waits."""
    model = load(folder)
    model(PROMPTS, labels=PROMPTS).loss.backward()
    if name == "push_to_hub":  # there is no Hub, and rank 0 alone would upload
        model.save_pretrained = mock.Mock(side_effect=lambda folder, **_: model.tp_group.gather(0))
    with told() as messages:
        if model.tp_group.rank:
            _get_default_store().wait(["told"])
        with mock.patch("transformers.utils.PushToHubMixin.push_to_hub"):
            CALLS[name](model, target)
    return messages, model(PROMPTS).logits.detach()


@pytest.mark.parametrize("name", wide(list(CALLS), 2))
def test_a_rank_that_waits_says_for_whom(pool, cases, tmp_path, name) -> None:
    (messages, logits), (nothing, others) = pool.run(2, late, cases(9, 3).folder, str(tmp_path), name)
    assert nothing == []
    assert f"{name} (test_waits.py:" in messages[0]
    assert "has waited 1 s for rank 1, which has not called it: rank 1 is alive, at test_waits.py:" in messages[0]
    assert "_get_default_store().wait" in messages[0]
    assert torch.equal(logits, others)


def elsewhere(folder: str, target: str, name: str) -> tuple[str, float]:
    """Run on every rank: what each raises where rank 0 makes a call alone, and how far off its logits then are."""
    model = load(folder)
    expected = model(PROMPTS).logits.detach()
    with told() as messages:
        try:
            dist.barrier() if model.tp_group.rank else CALLS[name](model, target)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    assert messages == []
    with pytest.raises(RemoteRankError, match="has not called"):
        model(PROMPTS)
    renew_process_group(model)
    return raised, relative(model(PROMPTS).logits.detach(), expected)


@pytest.mark.parametrize("name", wide(["save_pretrained", "generate", "forward"], 1))
def test_ranks_that_wait_in_different_calls_raise(pool, cases, tmp_path, name) -> None:
    found = pool.run(2, elsewhere, cases(9, 3).folder, str(tmp_path), name, timeout=60)
    (first, _), differences = zip(*found, strict=True)
    assert re.match(f"RemoteRankError: rank .*has not called ({name}|barrier)", first)
    assert differences == (0.0, 0.0)


def fewer_batches(folder: str) -> list[str]:
    """Run on 4 ranks, two copies of a model: the second has a batch less; what a rank of the first is told."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = load(folder, device_mesh=mesh)
    data_parallel(model, mesh)
    copy = dist.get_rank() // 2
    with told() as messages:
        for _ in range(2 - copy):
            model(PROMPTS, labels=PROMPTS).loss.backward()
        if copy:
            _get_default_store().wait(["told"])
            model(PROMPTS, labels=PROMPTS).loss.backward()
    return messages


@pytest.mark.slow
def test_a_copy_without_a_batch_is_named(pool, cases) -> None:
    first, second, *others = pool.run(4, fewer_batches, cases(9, 3).folder)
    assert others == [[], []]
    for rank, messages in enumerate((first, second)):
        for message in messages[:1]:
            assert "backward (test_waits.py:" in message
            assert f"for rank {rank + 2}, which has not called it" in message
    assert first + second
