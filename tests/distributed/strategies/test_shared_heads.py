"""KV heads that several ranks hold: their gradients are summed without a process group beside the axis' own."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

import tp_transformers
from tests.support.comparisons import gradient_differences, gradients, relative
from tests.support.groups import join
from tests.support.models import MASK, PROMPTS, load
from tests.support.on_ranks import on_ranks
from tp_transformers.slices.layout import Layout, Ranks, heads, packed
from tp_transformers.strategies import ParamShard, take

TOLERANCE = 1e-6  # sums in another order, in fp64


def backward(model: Any, length: int = PROMPTS.shape[1]) -> None:
    ids = PROMPTS[:, :length]
    model(ids, attention_mask=MASK[:, :length], labels=ids).loss.backward()


def largest_error(ours: Any, theirs: Any) -> float:
    """The largest error of a gradient; every rank has the gradients that one process has."""
    assert gradients(ours).keys() == gradients(theirs).keys()
    return max(gradient_differences(ours, theirs).values())


@pytest.mark.slow
@pytest.mark.parametrize(("size", "heads"), [(3, (8, 2)), (4, (8, 2))])
@on_ranks()
def test_gradients_of_shared_heads(folder) -> None:
    """In each way to train; some ranks share a head and others may not.

    3 ranks: head 0 on ranks 0 and 1, head 1 on rank 2 alone, which takes part in the sums all the same.
    """
    dist.init_process_group("gloo")
    groups = len(dist.distributed_c10d._world.pg_map)

    def hold(what: str, ours: Any, theirs: Any, length: int = PROMPTS.shape[1]) -> None:
        for model in (ours, theirs):
            backward(model, length)
        assert largest_error(ours, theirs) < TOLERANCE, what
        for model in (ours, theirs):
            model.zero_grad()

    ours, theirs = load(folder, dtype=torch.float64), LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    hold("plain", ours, theirs)
    hold("another length", ours, theirs, 5)
    hold("a copy", copy.deepcopy(ours), theirs)
    hold("a second load", load(folder, dtype=torch.float64), theirs)
    for model in (ours, theirs):
        model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
        model.model.layers[1].self_attn.v_proj.weight.requires_grad_(False)
    hold("some frozen", ours, theirs)
    for model in (ours, theirs):
        model.requires_grad_(True).train().gradient_checkpointing_enable()
    hold("checkpointing", ours, theirs)
    for model in (ours, theirs):
        backward(model)
    norms = tp_transformers.clip_grad_norm_(ours, 0.1), torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    assert relative(*norms) < TOLERANCE
    assert largest_error(ours, theirs) < TOLERANCE, "clipped"
    config = LoraConfig(r=3, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    adapted = []
    for model in (load(folder, dtype=torch.float64), LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)):
        torch.manual_seed(5)
        adapted.append(get_peft_model(model, copy.deepcopy(config)))
    weights = {name: param for name, param in adapted[1].named_parameters() if "lora_" in name}
    adapted[0].load_state_dict(weights, strict=False)
    hold("LoRA", *adapted)
    assert len(dist.distributed_c10d._world.pg_map) == groups


@on_ranks(2, heads=(8, 1))
def test_process_groups_of_the_users_own_on_some_ranks(folder) -> None:
    dist.init_process_group("gloo")
    dist.new_group([0])  # which only rank 0 is in
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)
        dist.new_group([1], use_local_synchronization=True)
    ours, theirs = load(folder, dtype=torch.float64), LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for model in (ours, theirs):
        backward(model)
    assert largest_error(ours, theirs) < TOLERANCE


@on_ranks(4, heads=(8, 2))
def test_a_load_on_part_of_the_world_makes_no_process_group(folder) -> None:
    """Ranks 0 to 2 load while rank 3 makes no process group at all, then all meet."""
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
    part = dist.device_mesh.DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("tp",))
    if dist.get_rank() < 3:
        known = len(dist.distributed_c10d._world.pg_map)
        load(folder, device_mesh=part)
        assert len(dist.distributed_c10d._world.pg_map) == known
    assert mesh.size() == 4
    dist.barrier()


@on_ranks(3, heads=(8, 2))
def test_a_load_after_one_that_failed_on_one_rank(folder) -> None:
    """The load that fails on one rank alone leaves the next one as it was."""
    with pytest.raises(tp_transformers.TensorParallelError):
        load(f"{folder}-nowhere" if os.environ["RANK"] == "1" else folder, dtype=torch.float64)
    backward(load(folder, dtype=torch.float64))


@on_ranks(4)
def test_gradients_of_shared_indices_are_summed_over_their_holders() -> None:
    """A packed query-key-value weight whose KV heads are replicated: every rank ends with the whole gradient."""
    group = join()
    query, kv = heads(8, 2, Ranks(group.size))
    layout = Layout(0, packed([query, kv, kv]))
    weight = torch.arange(12.0, dtype=torch.float64).reshape(12, 1)
    shard = ParamShard(weight.shape, layout, group)
    local = shard.wrap(take(weight, layout, group.rank).clone(), requires_grad=True)
    # Every rank adds its rank + 1 to the gradient of all that it holds.
    (shard.view(local) * (group.rank + 1)).sum().backward()
    # KV head 0 is on ranks 0 and 1 (1 + 2), KV head 1 on ranks 2 and 3 (3 + 4).
    found = tp_transformers.full_tensor(local, local.grad).flatten().tolist()
    assert found == [1, 1, 2, 2, 3, 3, 4, 4, 3, 7, 3, 7]


@on_ranks(3)
def test_heads_may_be_shared_by_some_ranks_and_then_by_others() -> None:
    """KV heads that only some ranks share, then one that all of them do, then the first again."""
    group = join()
    # KV head 0 of 2 is on ranks 0 and 1 (1 + 2), KV head 1 on rank 2 (3); that of 1 on all (1 + 2 + 3).
    for kv, expected in ((2, [3, 3]), (1, [6]), (2, [3, 3])):
        shard = ParamShard(torch.Size([kv]), Layout(0, heads(8, kv, Ranks(group.size))[1]), group)
        local = shard.wrap(torch.ones(1), requires_grad=True)
        (shard.view(local) * (group.rank + 1)).sum().backward()
        assert tp_transformers.full_tensor(local, local.grad).tolist() == expected
