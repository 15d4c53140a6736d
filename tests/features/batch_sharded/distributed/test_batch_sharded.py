"""Ranks that share modules, and have batches of their own, held against one process that has all of them."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.comparisons import (
    compare_seen,
    full_gradients,
    gradient_differences,
    parameter_differences,
    relative,
    relative_errors,
)
from tests.support.models import MASK, PROMPTS, VOCAB, load, observe
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.training import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    MAX_NORM,
    NORM_TOLERANCE,
    WEIGHT_TOLERANCE,
    mesh_of,
)
from tp_transformers import local_tensor

STEPS = 3
LENGTH = 9
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(2, -1)

EVERYTHING = ["model.embed_tokens", "model.layers.0", "model.layers.1.mlp", "lm_head"]


def batches(ranks: int) -> list[dict[str, torch.Tensor]]:
    """A batch for every rank: the first has a sample more, and the last has one that is padded."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for rank in range(ranks):
        ids = torch.randint(3, VOCAB, (2 + (rank == 0), LENGTH), generator=generator)
        found.append({"input_ids": ids, "labels": ids})
    mask = torch.ones_like(found[-1]["input_ids"])
    mask[0, :4] = 0
    found[-1] |= {"attention_mask": mask, "labels": found[-1]["labels"].masked_fill(mask == 0, -100)}
    return found


def load_on_mesh(folder: str, copies: int, chosen: Any, **options: Any) -> tuple[Any, Any]:
    mesh = mesh_of(copies)
    return load(folder, device_mesh=mesh, tp_batch_sharded=chosen, **options), mesh


def options_of(model: Any) -> dict[str, Any]:
    return {"output_router_logits": True} if hasattr(model, "router_aux_loss_coef") else {}


def train(model: Any, groups: Any, step: Any, clip: Any) -> dict[str, Any]:
    # A large epsilon: steps that go by the sign of a gradient alone would show rounding.
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-2)
    losses, norms, grads = [], [], {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(model))
        grads = full_gradients(model)
        norms.append(clip(model).item())
        optimizer.step()
    return {"losses": torch.stack(losses), "norms": torch.tensor(norms), "grads": grads, "optimizer": optimizer}


@functools.cache
def one_process(folder: str, ranks: int) -> tuple[Any, dict[str, Any]]:
    """What one process trains on all batches, by the mean of their losses; `losses`: (steps, ranks)."""

    def step(model: Any) -> torch.Tensor:
        losses = torch.stack([model(**batch, **options_of(model)).loss for batch in batches(ranks)])
        losses.mean().backward()
        return losses.detach()

    def clip(model: Any) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, train(model, model.parameters(), step, clip)


def check_trained(
    folder: str, copies: int, chosen: Any, mode: Any, saved: str, chaos: float = 1, share: float = math.inf, **plan: str
) -> None:
    """Run on every rank: training is that of one process.

    chaos: by how much more than in a Llama rounding grows; share: of the parameters, more than a rank holds.
    """
    model, mesh = load_on_mesh(folder, copies, chosen, **plan)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tp_transformers.data_parallel(model, mesh, mode=mode)

    def step(model: Any) -> torch.Tensor:
        loss = model(**batches(ranks)[rank], **options_of(model)).loss
        loss.backward()
        return loss.detach()

    def clip(model: Any) -> torch.Tensor:
        return tp_transformers.clip_grad_norm_(model, MAX_NORM)

    seen = train(model, tp_transformers.training.parameter_groups(model), step, clip)
    trained, expected = one_process(folder, ranks)
    weights = {name: param.detach() for name, param in trained.named_parameters()}
    assert relative(seen["losses"], expected["losses"][:, rank]) < LOSS_TOLERANCE
    assert relative(seen["norms"], expected["norms"]) < NORM_TOLERANCE * chaos
    assert max(relative_errors(seen["grads"], expected["grads"]).values()) < GRADIENT_TOLERANCE * chaos
    assert max(parameter_differences(model, trained).values()) < WEIGHT_TOLERANCE
    # What is saved, in both ways, is what was trained.
    model.save_pretrained(saved)
    states = {"optimizer": tp_transformers.training.optimizer_state_dict(model, seen["optimizer"])}
    dcp.save({**states, "model": model.state_dict()}, checkpoint_id=f"{saved}-state")
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(saved)
    assert max(parameter_differences(again, trained).values()) < WEIGHT_TOLERANCE
    whole = {"model": {name: torch.empty_like(weight) for name, weight in weights.items()}}
    moments = {name: {"exp_avg": torch.empty_like(weight)} for name, weight in weights.items()}
    dcp.load({**whole, "optimizer": {"state": moments}}, checkpoint_id=f"{saved}-state")
    assert max(relative_errors(whole["model"], weights).values()) < WEIGHT_TOLERANCE
    state = expected["optimizer"].state
    for name, moment in moments.items():
        of_one = state[trained.get_parameter(name)]["exp_avg"]
        assert relative(moment["exp_avg"], of_one) < GRADIENT_TOLERANCE * chaos, name
    # Two backwards, averaged each, are their sum.
    if mode == "replicate":
        model.zero_grad()
        trained.zero_grad()
        for _ in range(2):
            step(model)
            torch.stack([trained(**b, **options_of(trained)).loss for b in batches(ranks)]).mean().backward()
        assert max(gradient_differences(model, trained).values()) < GRADIENT_TOLERANCE * chaos
    held = sum(local_tensor(param).numel() for param in model.parameters())
    assert held / sum(weight.numel() for weight in weights.values()) < share


@pytest.fixture
def checkpoint(cases: Any, made: Any, kind: Any) -> str:
    """A Llama with as many heads, one with tied weights, or a Mixtral."""
    if kind == "mixtral":
        return made("mixtral", (9, 3)).folder
    return cases(9, 3, tie_word_embeddings=True).folder if kind == "tied" else cases(*kind).folder


@needs("data_parallel")
@pytest.mark.parametrize(
    ("size", "copies", "kind", "chosen", "mode", "share"),
    wide(
        [
            (3, 1, (8, 2), True, "replicate", 0.8),
            (2, 1, "tied", EVERYTHING, "shard", 0.9),
            (4, 2, (9, 3), EVERYTHING, "shard", 0.45),
            (2, 1, (9, 3), True, "replicate", 0.9),
            (4, 2, "mixtral", True, "shard", 0.45),
            (2, 1, "mixtral", ["model.layers.*.mlp"], "replicate", 0.8),
            (4, 2, (8, 2), EVERYTHING, "replicate", 0.8),
        ],
        2,
    ),
)
@on_ranks()
def test_ranks_train_as_one_process(checkpoint, tmp_path, copies, kind, chosen, mode, share) -> None:
    chaos = 50 if kind == "mixtral" else 1  # routers whose gradients nearly cancel
    check_trained(checkpoint, copies, chosen, mode, str(tmp_path / "saved"), chaos=chaos, share=share)


# -- gradient checkpointing


@needs("data_parallel")
@pytest.mark.parametrize("way", [False, True], ids=["kept", "re-entrant"])
@on_ranks()
def test_layers_are_computed_again_for_the_batch_that_they_had(folder, way) -> None:
    """Steps that differ in samples and length, with forwards in between."""
    model, mesh = load_on_mesh(folder, 1, True)
    trained = AutoModelForCausalLM.from_pretrained(folder)
    tp_transformers.data_parallel(model.train(), mesh)
    model.gradient_checkpointing_enable({"use_reentrant": way})
    model.enable_input_require_grads()
    for samples, length in ((2, 9), (2, 9), (1, 9), (2, 7)):
        given = torch.randint(3, VOCAB, (2, samples, length), generator=torch.Generator().manual_seed(length))
        model.zero_grad()
        trained.zero_grad()
        loss = model(given[dist.get_rank()], labels=given[dist.get_rank()]).loss
        with torch.no_grad():
            model(given[0, :, :5])
        loss.backward()
        torch.stack([trained(ids, labels=ids).loss for ids in given]).mean().backward()
        assert max(gradient_differences(model, trained).values()) < GRADIENT_TOLERANCE, (samples, length)


# -- dropout


@needs("data_parallel")
@pytest.mark.parametrize("checkpoints", [False, True])
@on_ranks(heads=(9, 9), model="gpt2")
def test_dropouts_have_gradients(folder, checkpoints) -> None:
    """The mean of all losses grows along its gradient as the gradient says, in fp64.

    Ranks that draw their own numbers draw alike on what each computes of all samples.
    """
    drops = {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2}
    model, mesh = load_on_mesh(folder, 1, True, dtype=torch.float64, **drops)
    tp_transformers.data_parallel(model.train(), mesh)
    batch, other = (batches(ranks)[dist.get_rank()] for ranks in (2, 3))
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def loss_of() -> torch.Tensor:
        torch.manual_seed(7 + dist.get_rank())  # each rank drops as it likes
        return model(**batch).logits.square().mean()  # transformers' loss is in fp32

    def mean_of(loss: torch.Tensor) -> float:
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    loss = loss_of()
    with torch.no_grad():
        model(input_ids=other["input_ids"][:, :5])  # of another length, before the layers are computed again
    loss.backward()
    expected = tp_transformers.clip_grad_norm_(model, float("inf")).item() ** 2
    step, found = 1e-5, []
    for sign in (1, -2):
        with torch.no_grad():
            for param in model.parameters():
                local_tensor(param).add_(local_tensor(param.grad), alpha=sign * step)
            found.append(mean_of(loss_of()))
    # But for the curvature over the step.
    assert abs((found[0] - found[1]) / (2 * step) - expected) < 1e-4 * expected


# -- what goes through, and what does not


@needs("debug")
@on_ranks(heads=(8, 2))
def test_faults_of_one_rank_are_errors_on_all(folder) -> None:
    """After the errors, everything is as before."""
    model, _ = load_on_mesh(folder, 1, EVERYTHING)
    first, expected = dist.get_rank() == 0, observe(AutoModelForCausalLM.from_pretrained(folder))
    ready_made = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    cache = model.generate(PROMPTS, max_new_tokens=1, return_dict_in_generate=True).past_key_values
    usual, packed = model.config._attn_implementation, torch.tensor([[0, 1, 2, 0, 1, 2, 3]])

    def with_attention(kind: str, **inputs: Any) -> None:
        model.config._attn_implementation = kind
        try:
            model(PROMPTS[:1], **inputs)
        finally:
            model.config._attn_implementation = usual

    for call, says in (
        (lambda: model(PROMPTS[:, : 6 + first]), "sequences of 7 on rank 0 and of 6 on rank 1"),
        (
            lambda: model(PROMPTS, attention_mask=None if first else ready_made),
            "attention masks that some ranks have made",
        ),
        (lambda: model(PROMPTS, output_attentions=first), "output_attentions=True"),
        (lambda: model(PROMPTS[:, :1], past_key_values=None if first else cache), "past_key_values"),
        (
            lambda: model(PROMPTS, position_ids=POSITIONS, cu_seq_lens_q=torch.tensor([0, 3, 7]) if first else None),
            "cu_seq_lens_q",
        ),
        (
            lambda: with_attention("flash_attention_2", position_ids=packed if first else None),
            "position_ids that start again in a rank's only row",
        ),
        (
            lambda: with_attention("flex_attention", attention_mask=MASK[:1] if first else None),
            "flex attention with a mask",
        ),
        (
            lambda: model.lm_head(torch.zeros(1, 1 + first, model.config.hidden_size)),
            "sequences of 2 on rank 0 and of 1 on rank 1",
        ),
        (
            lambda: model.generate(PROMPTS + first, max_new_tokens=1),
            "generate's inputs: got one on rank 0 and another on rank 1",
        ),
        (lambda: tp_transformers.debug.check_inputs(model), "batches of their own"),
        (
            lambda: get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)),
            "lora_dropout, where ranks have batches of their own",
        ),
        (
            lambda: get_peft_model(model, LoraConfig(target_modules=["lm_head"])),
            "an adapter on a layer with the strategy colwise_rep, input: batch-sharded",
        ),
    ):
        with pytest.raises(tp_transformers.TensorParallelError, match=says):
            call()
    seen = observe(model)  # of the same prompts on all ranks, generated too
    compared = compare_seen(model, seen, expected)
    own = {"input_ids": PROMPTS[dist.get_rank()][None], "attention_mask": MASK[dist.get_rank()][None]}
    logits = model(**own).logits.detach()
    assert max(compared["logits"], relative(logits, expected["logits"][dist.get_rank()][None])) < 1e-5
    assert compared["grads"][1] < GRADIENT_TOLERANCE, compared["grads"]
    assert compared["tokens"]


@on_ranks(heads=(8, 4), model="mixtral")
def test_router_logits_of_some_samples_are_refused(folder) -> None:
    """Without the router logits, of which some are of all ranks' samples, it works."""
    model, _ = load_on_mesh(folder, 1, ["model.layers.0.mlp"])
    model(PROMPTS)
    says = "where only some mixtures of experts are batch-sharded"
    with pytest.raises(tp_transformers.UnsupportedError, match=says):
        model(PROMPTS, output_router_logits=dist.get_rank() == 0)


@needs("debug")
@on_ranks(4, heads=(8, 4))
def test_the_partition_is_printed(folder) -> None:
    found = []
    for chosen in (None, ["model.layers.1.mlp", "lm_head"]):
        model, mesh = load_on_mesh(folder, 2, chosen)
        before = str(tp_transformers.debug.partition(model, mesh))
        tp_transformers.data_parallel(model, mesh)
        found.append(str(tp_transformers.debug.partition(model)))
        assert found[-1] == before
    norms = "model.layers.*.input_layernorm, model.layers.*.post_attention_layernorm, model.norm"
    lines = ["TP_GROUP: [0, 1], [2, 3]", "DP_GROUP: [0, 2], [1, 3]"]
    lines += [
        f"dp_rank {dp} (tp_rank {tp}): model.embed_tokens:{tp}, model.layers.*.self_attn:{tp}, "
        f"model.layers.*.mlp:{tp}, {norms}, lm_head:{tp}"
        for dp in range(2)
        for tp in range(2)
    ]
    assert found[0].splitlines() == lines
    lines = ["TP_GROUP: [0, 1], [2, 3]", "DP_GROUP: [0, 1, 2, 3]", "DP_GROUP of shards: [0, 2], [1, 3]"]
    lines += [
        f"dp_rank {rank} (tp_rank {rank % 2}): model.embed_tokens, model.layers.*.self_attn, model.layers.0.mlp, "
        f"model.layers.1.mlp:{rank % 2}, {norms}, lm_head:{rank % 2}"
        for rank in range(4)
    ]
    assert found[1].splitlines() == lines
