"""Training on real ranks, step by step what one process does on the whole batch."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.comparisons import (
    different_tensors,
    full_gradients,
    full_parameters,
    gradient_differences,
    largest_step,
    parameter_differences,
    relative,
    relative_errors,
)
from tests.support.models import load, load_both
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.training import (
    BATCH,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    MAX_NORM,
    NORM_TOLERANCE,
    WEIGHT_TOLERANCE,
    mesh_of,
)

ROUNDING = 2e-6


def train(model: Any, groups: Any, batch: torch.Tensor, clip: Any, steps: int = 3, **options: Any) -> dict[str, Any]:
    """What some clipped steps of AdamW do: losses, norms, the gradients of the last one before it is clipped.

    `wrong` is by how much the norms differ from those of the gradients, gathered.
    """
    # A large epsilon: steps that go by the sign of a gradient alone would show rounding.
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-2, **options)
    losses, norms, grads, wrong = [], [], {}, 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch, labels=batch).loss
        loss.backward()
        grads = full_gradients(model)
        for kind, limit in ((1.0, float("inf")), (float("inf"), float("inf")), (2.0, MAX_NORM)):
            norms.append(clip(model, limit, kind).item())
            whole = torch.linalg.vector_norm(torch.stack([grad.norm(kind) for grad in grads.values()]), kind).item()
            wrong = max(wrong, abs(norms[-1] - whole) / whole)
        optimizer.step()
        losses.append(loss.detach())
    return {
        "losses": torch.stack(losses),
        "norms": torch.tensor(norms),
        "grads": grads,
        "states": optimizer.state,
        "wrong": wrong,
    }


@functools.cache
def one_process(folder: str) -> tuple[Any, dict[str, Any]]:
    """A model that one process has trained on the whole batch."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)

    def clip(model: Any, *args: Any) -> Any:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), *args)

    return model, train(model, model.parameters(), BATCH, clip)


def check_trained(model: Any, seen: dict[str, Any], folder: str, chaos: float = 1) -> None:
    """A trained model, its steps and its optimizer's moments are those of one process.

    `chaos`: by how much more than in a Llama rounding grows on the way through the model.
    """
    expected_model, expected = one_process(folder)
    assert seen["wrong"] < ROUNDING
    assert largest_step(seen["norms"], expected["norms"]) < NORM_TOLERANCE * chaos
    assert relative(seen["losses"], expected["losses"]) < LOSS_TOLERANCE
    assert max(relative_errors(seen["grads"], expected["grads"]).values()) < GRADIENT_TOLERANCE * chaos
    assert max(parameter_differences(model, expected_model).values()) < WEIGHT_TOLERANCE
    for name, param in model.named_parameters():
        moment = tp_transformers.full_tensor(param, seen["states"][param]["exp_avg"])
        of_one = expected["states"][expected_model.get_parameter(name)]["exp_avg"]
        assert relative(moment, of_one) < GRADIENT_TOLERANCE * chaos, name


@pytest.fixture
def checkpoint(cases: Any, made: Any, kind: str) -> str:
    """A model of a kind."""
    if kind == "mixtral":
        return made("mixtral", (9, 3)).folder
    config = {"tie_word_embeddings": True} if kind == "shared and tied" else {}
    return cases(*{"even": (8, 4), "uneven": (9, 3), "shared and tied": (8, 1)}[kind], **config).folder


@needs("full_parameters")
@pytest.mark.parametrize(
    ("kind", "mode"),
    wide(
        [
            ("uneven", "replicate"),
            ("shared and tied", "shard"),
            ("uneven", "shard"),
            ("shared and tied", "replicate"),
            *((kind, mode) for kind in ("even", "mixtral") for mode in ("replicate", "shard")),
        ],
        2,
    ),
)
@on_ranks(4)
def test_copies_train_as_one_process(checkpoint, tmp_path, kind, mode) -> None:
    """Two copies on two ranks each train, are compared, and save."""
    mesh, saved = mesh_of(2), str(tmp_path / "saved")
    chaos = 50 if kind == "mixtral" else 1  # routers whose gradients nearly cancel
    model = load(checkpoint, device_mesh=mesh)
    if mesh["dp"].get_local_rank():
        with torch.no_grad():  # the copies start as the first, whatever they were
            tp_transformers.local_tensor(next(model.parameters())).zero_()
    held = sum(tp_transformers.local_tensor(param).numel() for param in model.parameters())
    whole = [tuple(param.tp_shard.shape) for param in model.parameters()]
    tp_transformers.data_parallel(model, mesh, mode=mode)
    model.to("cpu")  # makes new DTensors of them all
    mine = BATCH.chunk(2)[mesh["dp"].get_local_rank()]
    groups = tp_transformers.training.parameter_groups(model)
    seen = train(model, groups, mine, tp_transformers.clip_grad_norm_, foreach=True)
    dist.all_reduce(seen["losses"], group=mesh["dp"].get_group())
    seen["losses"] /= 2
    check_trained(model, seen, checkpoint, chaos)
    model.save_pretrained(saved)
    dist.barrier()
    trained, _ = one_process(checkpoint)
    errors = parameter_differences(AutoModelForCausalLM.from_pretrained(saved), trained)
    assert max(errors.values()) < WEIGHT_TOLERANCE
    name = "MixtralForCausalLM" if kind == "mixtral" else "LlamaForCausalLM"
    assert f'"{name}"' in (tmp_path / "saved" / "config.json").read_text()
    assert model.state_dict().keys() == trained.state_dict().keys()
    share = sum(tp_transformers.local_tensor(param).numel() for param in model.parameters()) / held
    assert share < 0.6 if mode == "shard" else share == 1
    assert whole == [tuple(param.tp_shard.shape) for param in model.parameters()]
    check_states(model, trained, f"{saved}-state")
    with torch.no_grad():  # what an evaluation leaves behind can still be gathered
        model.eval()(mine)
    assert all(tp_transformers.full_tensor(param).shape == param.tp_shard.shape for param in model.parameters())
    if mode == "replicate":  # a backward that fails is not the last
        loss = model(mine, labels=mine).loss
        loss.register_hook(lambda grad: 1 / 0)
        with suppress(ZeroDivisionError):
            loss.backward()
    # Two halves of a batch, averaged once.
    model.zero_grad()
    for row, synchronises in zip(mine, (False, True), strict=True):
        model.set_requires_gradient_sync(synchronises)
        (model(row[None], labels=row[None]).loss / 2).backward()
    trained.zero_grad()
    trained(BATCH, labels=BATCH).loss.backward()
    assert max(gradient_differences(model, trained).values()) < GRADIENT_TOLERANCE * chaos
    # Copies that end at different lengths.
    count = 2 + 3 * mesh["dp"].get_local_rank()
    text = model.eval().generate(mine[:1], max_new_tokens=count, min_new_tokens=count, do_sample=False)
    assert text.shape[1] - mine.shape[1] == count
    message = r"add the adapter, then call tp_transformers\.data_parallel"
    with pytest.raises(tp_transformers.UnsupportedError, match=message):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def check_states(model: Any, trained: Any, folder: str) -> None:
    """What torch.distributed.checkpoint saves is the model, and what it and one process give back is."""
    expected = full_parameters(model)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    whole = {name: torch.empty_like(value) for name, value in expected.items()}
    dcp.load(whole, checkpoint_id=folder)
    assert different_tensors(whole, expected) == []
    for state in (None, expected):
        with torch.no_grad():
            for param in model.parameters():
                tp_transformers.local_tensor(param).fill_(7)
        if state is None:
            state = model.state_dict()
            dcp.load(state, checkpoint_id=folder)
        # Strict where one process is: tied parameters stand there under two names.
        model.load_state_dict(state, strict=len(state) == len(trained.state_dict()))
        assert different_tensors(full_parameters(model), expected) == []


@needs("peft")
@on_ranks(4)
def test_adapters_and_own_layers_train_under_fsdp(folder) -> None:
    """Train adapters, of embeddings too, and a layer that no plan knows, under FSDP."""
    mesh = mesh_of(2)
    targets = ["q_proj", "o_proj", "embed_tokens", "lm_head"]
    models = list(load_both(folder, device_mesh=mesh))
    for index, base in enumerate(models):
        torch.manual_seed(1)
        models[index] = get_peft_model(base, LoraConfig(target_modules=targets, init_lora_weights="gaussian"))
        width = base.config.hidden_size
        base.added = nn.Linear(width, width)
        base.model.norm.register_forward_hook(lambda _, __, output, base=base: output + base.added(output))
    mine, theirs = models
    tp_transformers.data_parallel(mine, mesh, mode="shard")
    for model, batch in ((mine, BATCH.chunk(2)[mesh["dp"].get_local_rank()]), (theirs, BATCH)):
        model(batch, labels=batch).loss.backward()
    params = dict(mine.named_parameters())
    errors = {
        name: relative(tp_transformers.full_tensor(params[name], params[name].grad), param.grad)
        for name, param in theirs.named_parameters()
        if param.grad is not None and param.grad.any()  # what one matrix of zeros makes of the other's
    }
    norm, expected = tp_transformers.clip_grad_norm_(mine, 1.0), nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    errors["norm"] = relative(norm, expected)
    assert any("lora_embedding" in name for name in errors)
    assert max(errors.values()) < GRADIENT_TOLERANCE, errors


@on_ranks(heads=(8, 4))
def test_what_does_not_fit_is_refused(folder) -> None:
    mesh = mesh_of(2)
    model = load(folder, device_mesh=mesh["tp"])
    for arguments, says in (
        ({"axis": "ddp"}, r"the axes \('dp', 'tp'\).*'ddp'"),
        ({"mode": "shared"}, "mode='shared'"),
        ({"mp_policy": None}, "mp_policy"),
    ):
        with pytest.raises((tp_transformers.MeshError, tp_transformers.UnsupportedError), match=says):
            tp_transformers.data_parallel(model, mesh, **arguments)  # type: ignore[arg-type]


@on_ranks(heads=(8, 2))
def test_copies_start_alike_whatever_their_strides(folder) -> None:
    """A parameter and a buffer with gaps in memory, of which copies begin with others."""
    mesh = mesh_of(2)
    model = load(folder, device_mesh=mesh)
    values = torch.arange(6.0) + 10 * dist.get_rank()
    model.register_parameter("with_gaps", nn.Parameter(values[::2]))
    model.register_buffer("one_value", values[:1].expand(3))
    tp_transformers.data_parallel(model, mesh)
    assert [*model.with_gaps.tolist(), *model.one_value.tolist()] == [0.0, 2.0, 4.0, 0.0, 0.0, 0.0]


# -- tp alone


@needs("full_parameters")
@pytest.mark.slow
@pytest.mark.parametrize("heads", [(8, 4), (8, 2)])
@on_ranks(3)
def test_three_ranks_train_as_one_process(folder) -> None:
    """Clipped steps of a fused optimizer."""
    model = load(folder)
    groups = tp_transformers.training.parameter_groups(model)
    check_trained(model, train(model, groups, BATCH, tp_transformers.clip_grad_norm_, fused=True), folder)
