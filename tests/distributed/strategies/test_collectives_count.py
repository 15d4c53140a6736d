"""How often a model communicates: two all-reduces a layer, forward and backward, and no all-gather inside one."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.architectures import ARCHITECTURES, architecture_case
from tests.support.models import PROMPTS, load, load_both
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.tiny import MODELS
from tests.support.tiny_mixers import MIXERS
from tp_transformers.ranks import direct

LAYERS = 2
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "send",
    "recv",
)


def count(name: str, folder: str, **options: bool) -> tuple[Counter[str], Counter[str], list[int]]:
    """Collectives of one forward: of the whole model, inside its layers, and the elements of each all-reduce there."""
    return counted(load(folder, getattr(transformers, ARCHITECTURES[name].model), **options))


def counted(model: Any) -> tuple[Counter[str], Counter[str], list[int]]:
    """See `count`."""
    with torch.no_grad():
        model(PROMPTS)  # blocks tell each other uneven lengths once: see test_forwards
    everywhere: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    reduced: list[int] = []
    depth = [0]

    def counting(call: str, original: Any) -> Any:
        def call_and_count(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            everywhere[call] += 1
            if depth[0]:
                inside[call] += 1
                if call == "all_reduce":
                    reduced.append(tensor.numel())
            return original(tensor, *args, **kwargs)

        return call_and_count

    def in_layer(forward: Any) -> Any:  # a hook would be given the complete sequence
        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            try:
                return forward(*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    for layer in model.base_model.layers:
        layer.forward = in_layer(layer.forward)
    with ExitStack() as stack:
        for owner, calls in ((dist, COLLECTIVES), (direct, ("all_reduce", "all_gather", "reduce_scatter"))):
            for call in (call for call in calls if hasattr(owner, call)):
                stack.enter_context(mock.patch.object(owner, call, counting(call, getattr(owner, call))))
        with torch.no_grad():
            model(PROMPTS)
    return everywhere, inside, reduced


@pytest.mark.parametrize(
    ("name", "per_layer"),
    wide([("llama", 2), architecture_case("olmo2", 4), ("qwen2_moe", 3), ("mixtral", 2), ("phi3", 2), ("glm", 2)], 3),
)
def test_collectives_of_one_forward(pool, tmp_path, name, per_layer) -> None:
    model = ARCHITECTURES[name].make(8, 2)
    model.save_pretrained(tmp_path)
    for everywhere, inside, reduced in pool.run(2, count, name, str(tmp_path)):
        assert inside == {"all_reduce": per_layer * LAYERS}
        # Outside the layers: the sum of the embedding, and the logits.
        assert everywhere == {"all_reduce": per_layer * LAYERS + 1, "all_gather": 1}
        small = [size for size in reduced if size == PROMPTS.numel()]  # one number a token
        assert len(small) == (2 * LAYERS if name == "olmo2" else 0)
        assert set(reduced) - set(small) == {PROMPTS.numel() * model.config.hidden_size}


def count_sequence_parallel(name: str, folder: str) -> tuple[Counter[str], Counter[str]]:
    return count(name, folder, tp_sequence_parallel=True, tp_loss_parallel=True)[:2]


@needs("sequence", "loss_parallel")
@pytest.mark.parametrize(("name", "experts"), [("llama", 0), ("mixtral", 1)])
def test_collectives_of_one_forward_whose_sequence_is_cut(pool, tmp_path, name, experts) -> None:
    ARCHITECTURES[name].make(8, 2).save_pretrained(tmp_path)
    for everywhere, inside in pool.run(2, count_sequence_parallel, name, str(tmp_path)):
        # What all-reduces were is halved: one at the start of a block, one at its end; experts sum theirs themselves.
        halves = {"all_gather": 2 * LAYERS, "reduce_scatter": (2 - experts) * LAYERS}
        assert inside == halves | ({"all_reduce": LAYERS} if experts else {})
        # Outside the layers: the sum of the embedding, the last norm, and the logits.
        assert everywhere == inside + Counter(all_reduce=1, all_gather=2)


def count_backward(name: str, folder: str) -> None:
    """Run on every rank: collectives of one backward, of which one is that of the logits."""
    loss = load(folder, getattr(transformers, ARCHITECTURES[name].model))(PROMPTS, labels=PROMPTS).loss
    with mock.patch.object(direct, "all_reduce", wraps=direct.all_reduce) as counted:
        loss.backward()
    assert counted.call_count == 2 * LAYERS + 1


@pytest.mark.parametrize("name", wide(["phi3", "llama"], 1))
def test_layers_of_a_block_sum_the_gradient_of_their_input_together(pool, tmp_path, name) -> None:
    ARCHITECTURES[name].make(8, 2).save_pretrained(tmp_path)
    pool.run(2, count_backward, name, str(tmp_path))


WAITS = (
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::lift_fresh",  # of torch.tensor, which copies numbers of the host
)
"""Operators whose result the host waits for, or that wait for the host, so that a CUDA graph refuses them."""


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def decode(folder: str) -> tuple[Counter[str], Counter[str]]:
    """Operators of one decode step with a static cache: of this rank, and of one process."""
    found = []
    for model in load_both(folder):
        cache = transformers.StaticCache(model.config, max_cache_len=32)
        with torch.no_grad():
            model(PROMPTS, past_key_values=cache)
            positions = torch.full((len(PROMPTS), 1), PROMPTS.shape[1])
            with Operators() as operators:
                model(PROMPTS[:, :1], past_key_values=cache, position_ids=positions)
        found.append(operators.seen)
    return found[0], found[1]


DECODED = {
    "llama, 8, 2": 2 * LAYERS,
    "mixtral, 8, 2": 2 * LAYERS,
    "bamba, 8, 1": 2 * LAYERS + 1,  # the norm of a group that both ranks have
    "bamba, 8, 2": 2 * LAYERS,
    "qwen3_5_text, 8, 2": 2 * LAYERS,
    "lfm2, 8, 2": 2 * LAYERS,
    "gemma3n_text, 4, 4": 4 * LAYERS,  # the moments of its MLPs, too
    "phi3, 8, 2": 2 * LAYERS,
    "olmo2, 8, 2": 4 * LAYERS,
}
"""Models with attention, experts and mixers, their heads and KV heads or groups -> collectives of a decode step, beside
those of the embedding and of the logits."""


@needs("mixers", "architectures")
@pytest.mark.parametrize("key", wide(DECODED, 3))
def test_the_host_waits_for_nothing_in_a_decode_step(pool, tmp_path, key) -> None:
    name, *heads = key.split(", ")
    table: Any = ARCHITECTURES if name in ARCHITECTURES else MIXERS
    model = table[name].make(*map(int, heads)) if name in table else MODELS[name].make()
    model.float().save_pretrained(tmp_path)
    for ours, plain in pool.run(2, decode, str(tmp_path)):
        assert {each: ours[each] for each in WAITS} == {each: plain[each] for each in WAITS}
        helpers = ("wait_tensor", "_wrap_tensor_autograd")
        communicates = {each: ours[each] for each in ours if "c10d" in each and not each.endswith(helpers)}
        assert sum(communicates.values()) == DECODED[key] + 2, communicates


def communicated(operators: Operators) -> Counter[str]:
    """Collectives among operators."""
    return Counter({name: count for name, count in operators.seen.items() if name.startswith("c10d::")})


@on_ranks(2, heads=(8, 4))
def test_ranks_agree_in_a_step_only_where_something_can_differ(folder) -> None:
    """Collectives of a step of `generate` beside those of the model's forward."""
    model, one = load(folder), Counter({"c10d::allreduce_": 1})
    never = [lambda ids, scores, **_: torch.zeros(len(ids), dtype=torch.bool)]
    with torch.no_grad(), Operators() as forward:
        model(PROMPTS)
    for way, beside in (
        ({}, Counter()),
        ({"do_sample": True}, Counter()),  # from one random state, which the first step shares
        ({"num_beams": 2}, Counter()),
        ({"stopping_criteria": never}, one),
        ({"max_time": 1e6}, one),
    ):
        counts = []
        for new in (2, 3):
            with Operators() as operators:
                model.generate(PROMPTS, **{"do_sample": False, **way, "max_new_tokens": new, "min_new_tokens": new})
            counts.append(communicated(operators))
        step = counts[1] - counts[0]
        assert not communicated(forward) - step
        assert step - communicated(forward) == beside, way
