"""Training on real ranks, step by step what one process does on the whole batch."""

from __future__ import annotations

import functools
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support import architectures
from tests.support.models import VOCAB, Case, read_folder, relative
from tests.support.pool import Pool, WorkerError

pytestmark = pytest.mark.distributed

BATCH = torch.randint(3, VOCAB, (4, 9), generator=torch.Generator().manual_seed(3))
MAX_NORM = 0.5
"""Far below the norm of the gradients, so that every step is clipped."""

ROUNDING = 2e-6
# fp32 sums in another order, through a few steps.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-4


def load(folder: str, **arguments: Any) -> Any:
    with tp_transformers.enable():
        return AutoModelForCausalLM.from_pretrained(folder, **{"tp_plan": "auto", **arguments})


def mesh_of(copies: int) -> Any:
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("dp", "tp"))


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
        grads = {
            name: tp_transformers.full_tensor(p, p.grad) for name, p in model.named_parameters() if p.grad is not None
        }
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


def differences(model: Any, seen: dict[str, Any], expected_model: Any, expected: dict[str, Any]) -> dict[str, float]:
    weights = dict(expected_model.named_parameters())
    return {
        "wrong": seen["wrong"],
        "norms": ((seen["norms"] - expected["norms"]) / expected["norms"]).abs().max().item(),
        "losses": relative(seen["losses"], expected["losses"]),
        "grads": max(relative(seen["grads"][name], grad) for name, grad in expected["grads"].items()),
        "weights": max(
            relative(tp_transformers.full_tensor(param), weights[name].detach())
            for name, param in model.named_parameters()
        ),
        "moments": max(
            relative(
                tp_transformers.full_tensor(param, seen["states"][param]["exp_avg"]),
                expected["states"][weights[name]]["exp_avg"],
            )
            for name, param in model.named_parameters()
        ),
    }


def check(result: dict[str, Any], chaos: float = 1) -> None:
    """`chaos`: by how much more than in a Llama rounding grows on the way through the model."""
    print(result)
    assert result["wrong"] < ROUNDING
    assert result["norms"] < NORM_TOLERANCE * chaos
    assert result["losses"] < LOSS_TOLERANCE
    assert result["grads"] < GRADIENT_TOLERANCE * chaos
    assert result["moments"] < GRADIENT_TOLERANCE * chaos
    assert result["weights"] < WEIGHT_TOLERANCE


# -- dp x tp


def both_axes(folder: str, mode: str, saved: str) -> dict[str, Any]:
    """Run on every rank of two copies on two ranks each: train, compare, save."""
    mesh = mesh_of(2)
    model = load(folder, device_mesh=mesh)
    if mesh["dp"].get_local_rank():
        with torch.no_grad():  # the copies start as the first, whatever they were
            tp_transformers.local_tensor(next(model.parameters())).zero_()
    held = sum(tp_transformers.local_tensor(param).numel() for param in model.parameters())
    whole = [tuple(param.tp_shard.shape) for param in model.parameters()]
    tp_transformers.data_parallel(model, mesh, mode=mode)
    model.to("cpu")  # makes new DTensors of them all
    mine = BATCH.chunk(2)[mesh["dp"].get_local_rank()]
    groups = tp_transformers.parameter_groups(model)
    seen = train(model, groups, mine, tp_transformers.clip_grad_norm_, foreach=True)
    dist.all_reduce(seen["losses"], group=mesh["dp"].get_group())
    seen["losses"] /= 2
    result: dict[str, Any] = differences(model, seen, *one_process(folder))
    model.save_pretrained(saved)
    dist.barrier()
    trained = one_process(folder)[0]
    again = dict(AutoModelForCausalLM.from_pretrained(saved).named_parameters())
    result["saved"] = max(relative(again[name].detach(), param.detach()) for name, param in trained.named_parameters())
    result["names"] = model.state_dict().keys() == trained.state_dict().keys()
    result["share"] = sum(tp_transformers.local_tensor(param).numel() for param in model.parameters()) / held
    result["shapes"] = whole == [tuple(param.tp_shard.shape) for param in model.parameters()]
    result |= states(model, trained, f"{saved}-state")
    with torch.no_grad():  # what an evaluation leaves behind can still be gathered
        model.eval()(mine)
    result["gathers"] = all(
        tp_transformers.full_tensor(param).shape == param.tp_shard.shape for param in model.parameters()
    )
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
    result["accumulated"] = max(
        relative(tp_transformers.full_tensor(param, param.grad), trained.get_parameter(name).grad)
        for name, param in model.named_parameters()
    )
    # Copies that end at different lengths.
    count = 2 + 3 * mesh["dp"].get_local_rank()
    text = model.eval().generate(mine[:1], max_new_tokens=count, min_new_tokens=count, do_sample=False)
    result["generated"] = text.shape[1] - mine.shape[1] == count
    try:
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    except tp_transformers.UnsupportedError as error:
        result["adapters"] = str(error)
    return result


def states(model: Any, trained: Any, folder: str) -> dict[str, bool]:
    """Whether what torch.distributed.checkpoint saves is the model, and what it and one process give back is."""
    expected = {name: tp_transformers.full_tensor(param) for name, param in model.named_parameters()}

    def is_same(values: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(values[name], value) for name, value in expected.items())

    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    whole = {name: torch.empty_like(value) for name, value in expected.items()}
    checkpoint.load(whole, checkpoint_id=folder)
    found = {"checkpoint": is_same(whole)}
    for name, state in (("reloaded", None), ("whole", expected)):
        with torch.no_grad():
            for param in model.parameters():
                tp_transformers.local_tensor(param).fill_(7)
        if state is None:
            state = model.state_dict()
            checkpoint.load(state, checkpoint_id=folder)
        # Strict where one process is: tied parameters stand there under two names.
        model.load_state_dict(state, strict=len(state) == len(trained.state_dict()))
        found[name] = is_same({name: tp_transformers.full_tensor(param) for name, param in model.named_parameters()})
    return found


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return architectures.make_case(tmp_path_factory.mktemp("mixtral"), "mixtral", 9, 3)


@pytest.mark.parametrize("mode", ["replicate", "shard"])
@pytest.mark.parametrize("kind", ["even", "uneven", "shared and tied", "mixtral"])
def test_copies_train_as_one_process(
    pool: Pool, cases: Any, mixtral: Case, tmp_path: Path, kind: str, mode: str
) -> None:
    case = {
        "even": lambda: cases(8, 4),
        "uneven": lambda: cases(9, 3),
        "shared and tied": lambda: cases(8, 1, tie_word_embeddings=True),
        "mixtral": lambda: mixtral,
    }[kind]()
    for result in pool.run(4, both_axes, case.folder, mode, str(tmp_path / "saved"), timeout=120):
        chaos = 50 if kind == "mixtral" else 1  # routers whose gradients nearly cancel
        check(result, chaos)
        assert result["saved"] < WEIGHT_TOLERANCE
        assert result["accumulated"] < GRADIENT_TOLERANCE * chaos
        assert result["names"]
        assert result["generated"]
        assert "adapters that come after it" in result["adapters"]
        assert result["shapes"]
        assert result["gathers"]
        assert result["checkpoint"]
        assert result["reloaded"]
        assert result["whole"]
        assert result["share"] < 0.6 if mode == "shard" else result["share"] == 1
    config = (tmp_path / "saved" / "config.json").read_text()
    assert '"MixtralForCausalLM"' in config if kind == "mixtral" else '"LlamaForCausalLM"' in config


def adapted_copies(folder: str) -> dict[str, float]:
    """Train adapters, of embeddings too, and a layer that no plan knows, under FSDP."""
    mesh = mesh_of(2)
    targets = ["q_proj", "o_proj", "embed_tokens", "lm_head"]
    models = [load(folder, device_mesh=mesh), AutoModelForCausalLM.from_pretrained(folder)]
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
    return errors


def test_adapters_and_own_layers_train_under_fsdp(pool: Pool, cases: Any) -> None:
    for errors in pool.run(4, adapted_copies, cases(9, 3).folder):
        assert any("lora_embedding" in name for name in errors)
        assert max(errors.values()) < GRADIENT_TOLERANCE, errors


def other_meshes(folder: str) -> list[str]:
    mesh = mesh_of(2)
    model = load(folder, device_mesh=mesh["tp"])
    said = []
    for arguments in ({"axis": "ddp"}, {"mode": "shared"}, {"mp_policy": None}):
        try:
            tp_transformers.data_parallel(model, mesh, **arguments)  # type: ignore[arg-type]
        except (tp_transformers.MeshError, tp_transformers.UnsupportedError) as error:
            said.append(str(error))
    return said


def strided(folder: str) -> list[float]:
    """A parameter and a buffer with gaps in memory, of which copies begin with others."""
    mesh = mesh_of(2)
    model = load(folder, device_mesh=mesh)
    values = torch.arange(6.0) + 10 * dist.get_rank()
    model.register_parameter("with_gaps", nn.Parameter(values[::2]))
    model.register_buffer("one_value", values[:1].expand(3))
    tp_transformers.data_parallel(model, mesh)
    return [*model.with_gaps.tolist(), *model.one_value.tolist()]


def test_copies_start_alike_whatever_their_strides(pool: Pool, cases: Any) -> None:
    assert pool.run(2, strided, cases(8, 2).folder) == [[0.0, 2.0, 4.0, 0.0, 0.0, 0.0]] * 2


def test_what_does_not_fit_is_refused(pool: Pool, cases: Any) -> None:
    for axis, mode, option in pool.run(2, other_meshes, cases(8, 4).folder):
        assert "the axes ('dp', 'tp')" in axis
        assert "'ddp'" in axis
        assert "mode='shared'" in mode
        assert "mp_policy" in option


# -- tp alone


def one_axis(folder: str) -> dict[str, Any]:
    """Run on every rank: clipped steps; gradients with checkpoints, and under autocast."""
    model = load(folder)
    groups = tp_transformers.parameter_groups(model)
    seen = train(model, groups, BATCH, tp_transformers.clip_grad_norm_, fused=True)
    trained, expected = one_process(folder)
    result: dict[str, Any] = differences(model, seen, trained, expected)
    for name, autocast, checkpoints in (("checkpoints", False, True), ("autocast", True, True)):
        grads = []
        for either in (model, trained):
            either.zero_grad()
            either.train()
            if checkpoints:
                either.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = either(BATCH, labels=BATCH).loss
            loss.backward()
            grads.append({name: tp_transformers.full_tensor(p, p.grad) for name, p in either.named_parameters()})
        result[name] = max(relative(grads[0][name], grad) for name, grad in grads[1].items())
        result[f"{name} dtypes"] = {str(param.dtype) for param in model.parameters()}
    return result


@pytest.mark.parametrize("heads", [(8, 4), (8, 2)])
def test_three_ranks_train_as_one_process(pool: Pool, cases: Any, heads: tuple[int, int]) -> None:
    for result in pool.run(3, one_axis, cases(*heads).folder):
        check(result)
        assert result["checkpoints"] < GRADIENT_TOLERANCE
        assert result["autocast"] < 0.05  # bf16 has 8 bits, and what is summed over ranks is rounded once more
        assert result["autocast dtypes"] == {"torch.float32"}


# -- dropout

DROPOUT = {
    "llama": {"attention_dropout": 0.3},
    "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    "bart": {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2},
}
INSIDE = ("o_proj", "attn.c_proj", "out_proj", "fc2")
"""Modules whose inputs are a rank's own."""


class Adapter(nn.Module):
    """As LoRA's layers are: beside the layer that it is around, it drops some of the same, whole, input."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.drop = nn.Dropout(0.5)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base_layer(x)
        self.seen.append(self.drop(x).detach())
        return output


def remember(seen: list[torch.Tensor], module: nn.Module, args: Any) -> None:
    seen.append(args[0].detach().abs().sum((-1, -2)))


def dropped(name: str, folder: str) -> list[dict[str, Any]]:
    """Train without checkpoints, with each kind of them; what ranks hold whole, and what they do not."""
    results = []
    for checkpoints in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        import transformers

        with tp_transformers.enable():
            auto = getattr(transformers, architectures.ARCHITECTURES[name].model)
            model = auto.from_pretrained(folder, tp_plan="auto", **DROPOUT[name]).train()
        adapters = []
        if name == "llama":
            attention = model.model.layers[0].self_attn
            adapters = [Adapter(attention.q_proj), Adapter(attention.v_proj)]
            attention.q_proj, attention.v_proj = adapters
        if checkpoints is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)
        zeros: list[torch.Tensor] = []
        for path, module in model.named_modules():
            if path.endswith(INSIDE):
                module.register_forward_pre_hook(functools.partial(remember, zeros))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(5)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            output = model(BATCH, labels=BATCH)
            output.loss.backward()
            optimizer.step()
            losses.append(output.loss.item())
        whole = [param for param in model.parameters() if param.tp_shard.layout is None]
        replicated = [output.logits.detach(), torch.get_rng_state(), *map(tp_transformers.local_tensor, whole)]
        replicated += [seen for adapter in adapters for seen in adapter.seen]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (replicated, zeros[0]))
        results.append(
            {
                "same": all(torch.equal(a, b) for a, b in zip(everyone[0][0], everyone[1][0], strict=True)),
                "own": not torch.equal(everyone[0][1], everyone[1][1]),
                "losses": losses,
                "recomputed": len(zeros),
                "weights": [tp_transformers.full_tensor(param) for param in model.parameters()],
            }
        )
    return results


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_keeps_whole_activations_the_same(pool: Pool, tmp_path: Path, name: str) -> None:
    heads = architectures.ARCHITECTURES[name].variants[-1]
    case = architectures.make_case(tmp_path, name, *heads)
    for plain, *checkpointed in pool.run(2, dropped, name, case.folder):
        assert plain["same"]
        assert plain["own"]
        for result in checkpointed:
            assert result["same"]
            assert result["recomputed"] > plain["recomputed"]
            assert result["losses"] == pytest.approx(plain["losses"], rel=1e-6)
            pairs = zip(result["weights"], plain["weights"], strict=True)
            assert max(relative(mine, theirs) for mine, theirs in pairs) < GRADIENT_TOLERANCE


def even_heads_draw_their_own(folder: str) -> list[torch.Tensor]:
    """Attention weights that are dropped, of two ranks that hold the same heads: only the masks can differ."""
    model = load(folder, attention_dropout=0.5, attn_implementation="eager").train()
    rank = dist.get_rank()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                tp_transformers.local_tensor(projection.weight).fill_(0.01)
    torch.manual_seed(7)
    seen: list[torch.Tensor] = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(functools.partial(remember, seen))
    model(BATCH)
    assert rank == model.tp_group.rank
    return [seen[0], torch.get_rng_state()]


def test_attention_masks_differ_between_ranks(pool: Pool, cases: Any) -> None:
    (first, one_state), (second, other_state) = pool.run(2, even_heads_draw_their_own, cases(8, 4).folder)
    assert first.shape == second.shape
    assert not torch.equal(first, second)
    assert torch.equal(one_state, other_state)


# -- the guard


def guarded(folder: str, kind: str) -> bool:
    os.environ["TP_TRANSFORMERS_DEBUG"] = str(int(kind == "environment"))
    try:
        model = load(folder)
    finally:
        del os.environ["TP_TRANSFORMERS_DEBUG"]
    handle = tp_transformers.check_inputs(model) if kind != "environment" else None
    model(BATCH, attention_mask=torch.ones_like(BATCH), use_cache=False)
    rank = dist.get_rank()
    if kind == "random state":
        torch.manual_seed(rank)
        model(BATCH)  # which draws nothing
        model.train()(BATCH)
    if kind == "removed":
        assert handle is not None
        handle.remove()
    model(input_ids=BATCH - rank) if kind == "keyword" else model(BATCH - rank, attention_mask=None)
    return True


def test_different_inputs_are_one_error_on_all_ranks(pool: Pool, cases: Any) -> None:
    folder = cases(8, 4).folder
    assert pool.run(2, guarded, folder, "removed") == [True, True]
    for kind, subject in (("keyword", "input_ids"), ("environment", "input_ids"), ("random state", "random state")):
        with pytest.raises(WorkerError) as caught:
            pool.run(2, guarded, folder, kind)
        assert len(caught.value.errors) == 2
        for error in caught.value.errors.values():
            assert error.startswith("MeshError: the inputs of the model: got ")
            assert f"{subject} on rank 1" in error


# -- transformers' Trainer


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return len(BATCH)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": BATCH[index], "labels": BATCH[index]}


def with_trainer(
    folder: str, saved: str, copies: int, adapted: bool = False, loss: bool = False, fp16: bool = False
) -> dict[str, Any]:
    """Train on batches of two in all, evaluate, save; `copies`: of the model, which has two ranks each; 0 for one
    process. `adapted`: train LoRA alone; `loss`: with logits that are cut; `fp16`: with a scaler that begins too high.
    """
    from accelerate.state import AcceleratorState
    from transformers import TrainingArguments

    from tp_transformers.training.trainer import Trainer

    if not copies:  # for accelerate, torchrun's environment makes one process a distributed one
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)
    logging.disable(logging.INFO)
    try:
        mesh = mesh_of(copies) if copies else None
        options = {"device_mesh": mesh, "tp_loss_parallel": loss}
        model = load(folder, **options) if copies else AutoModelForCausalLM.from_pretrained(folder)
        if adapted:
            torch.manual_seed(1)
            targets = ["q_proj", "o_proj", "up_proj", "lm_head"]
            model = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights="gaussian"))
        if copies > 1:
            tp_transformers.data_parallel(model, mesh, mode="shard")
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                saved,
                per_device_train_batch_size=2 // max(copies, 1),
                per_device_eval_batch_size=2 if copies > 1 else 3,  # of four
                max_steps=3,
                learning_rate=1e-2,
                adam_epsilon=1e-2,
                max_grad_norm=MAX_NORM,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                fp16=fp16,
            ),
            train_dataset=Texts(),
            eval_dataset=Texts(),
            compute_metrics=lambda given: {"answers": (given.predictions.argmax(-1) * given.label_ids).sum()},
        )
        if fp16:  # accelerate makes no scaler on a CPU, and does what it does on a GPU where there is one
            trainer.accelerator.native_amp = True
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=2.0**-20)
        trainer.train()
        trainer.save_model()
        seen = trainer.evaluate()
        predicted = trainer.predict(Texts())  # type: ignore[arg-type]
        assert (predicted.label_ids == BATCH.numpy()).all()
        reloaded = 0.0
        if adapted:
            base = load(folder, **options) if copies else AutoModelForCausalLM.from_pretrained(folder)
            with torch.no_grad():
                logits = PeftModel.from_pretrained(base, saved).eval()(BATCH).logits
            reloaded = relative(logits, torch.from_numpy(predicted.predictions))
        history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        return {
            "losses": torch.tensor([entry["loss"] for entry in history]),
            "norms": torch.tensor([float(entry["grad_norm"]) for entry in history]),
            "evaluated": torch.tensor([seen["eval_loss"]]),
            "predicted": torch.from_numpy(predicted.predictions),
            "answers": seen["eval_answers"],
            "reloaded": reloaded,
            "scale": trainer.accelerator.scaler.get_scale() if fp16 else None,
        }
    finally:
        logging.disable(logging.NOTSET)
        AcceleratorState._reset_state(reset_partial_state=True)


def test_trainer_trains_and_evaluates_as_one_process(pool: Pool, cases: Any, tmp_path: Path) -> None:
    folder = cases(9, 3).folder
    for adapted, ways in ((False, ((1, False), (2, True))), (True, ((1, True),))):
        saved = str(tmp_path / f"one {adapted}")
        (expected,) = pool.run(1, with_trainer, folder, saved, 0, adapted)
        one = read_folder(saved)
        for copies, loss in ways:
            saved = str(tmp_path / f"{copies} copies {adapted}")
            for result in pool.run(2 * copies, with_trainer, folder, saved, copies, adapted, loss):
                assert len(result["losses"]) == 3
                assert relative(result["losses"], expected["losses"]) < LOSS_TOLERANCE
                assert relative(result["norms"], expected["norms"]) < NORM_TOLERANCE
                assert relative(result["evaluated"], expected["evaluated"]) < LOSS_TOLERANCE
                assert relative(result["predicted"], expected["predicted"]) < WEIGHT_TOLERANCE
                assert result["answers"] == expected["answers"]
                assert result["reloaded"] < WEIGHT_TOLERANCE
            files = read_folder(saved)
            assert one.keys() == files.keys()
            assert max(relative(files[name], value) for name, value in one.items()) < WEIGHT_TOLERANCE
