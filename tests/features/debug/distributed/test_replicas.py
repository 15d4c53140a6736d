"""What several ranks hold, found where it has drifted apart, told at saves, and brought together."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_transformers
from tests.support import architectures
from tests.support.comparisons import different_tensors, full_parameters
from tests.support.logged import logged
from tests.support.models import PROMPTS, load
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.training import BATCH, Texts, mesh_of

NORM, KEYS = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> str:
    return architectures.make_case(tmp_path_factory.mktemp("phi3"), "phi3", 8, 1).folder


@needs("data_parallel", "full_parameters")
@pytest.mark.parametrize(
    ("size", "mode", "shared"),
    [(3, None, KEYS), (4, "shard", KEYS), (4, "shard", "model.layers.0.self_attn.qkv_proj.weight")],
)
@on_ranks(heads=(8, 1))
def test_what_drifts_is_found_and_brought_together(folder, fused, mode, shared) -> None:
    """Of two copies where there is a mode."""
    folder = fused if "qkv" in shared else folder
    mesh = mesh_of(2 if mode else 1)
    model = load(folder, device_mesh=mesh)
    if mode:
        tp_transformers.data_parallel(model, mesh, mode=mode)  # type: ignore[arg-type]
    else:
        model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(tp_transformers.training.parameter_groups(model), lr=1e-3)
    for _ in range(2):
        model(BATCH, labels=BATCH).loss.backward()
        optimizer.step()
    check_replicas = tp_transformers.debug.check_replicas
    assert check_replicas(model, optimizer) == {}
    before = full_parameters(model)
    state = torch.get_rng_state()
    if model.tp_group.rank == model.tp_group.size - 1:
        with torch.no_grad():
            tp_transformers.local_tensor(model.get_parameter(NORM)).add_(0.5)
            local = tp_transformers.local_tensor(model.get_parameter(shared))
            if not mode or mesh["dp"].get_local_rank():  # FSDP's last rows: of fused ones, a part of the KV head
                local[-1:, 0].add_(2)
            tp_transformers.local_tensor(optimizer.state[model.get_parameter(NORM)]["exp_avg"]).fill_(7)
    moved = {NORM: pytest.approx(0.5), shared: pytest.approx(2)}
    assert check_replicas(model) == moved
    both = check_replicas(model, optimizer)
    assert both == moved | {f"{NORM}.exp_avg": pytest.approx(7, rel=0.1)}
    assert both == check_replicas(model, optimizer, synchronize=True)
    assert check_replicas(model, optimizer) == {}
    assert not different_tensors(full_parameters(model), before)
    assert torch.equal(torch.get_rng_state(), state)


@on_ranks(3, heads=(8, 2))
def test_groups_of_the_users_own_do_not_matter(folder) -> None:
    """A KV head that some ranks hold drifts, where rank 0 is in one more process group."""
    dist.init_process_group("gloo")
    dist.new_group([0])
    model = load(folder)
    shared = model.get_parameter(KEYS)
    assert {entry.ranks for entry in shared.tp_shard.layout.split.shared(0)} == {(0, 1)}
    if model.tp_group.rank == 1:
        with torch.no_grad():
            tp_transformers.local_tensor(shared)[0].add_(2)
    assert tp_transformers.debug.check_replicas(model, synchronize=True) == {KEYS: pytest.approx(2)}
    assert tp_transformers.debug.check_replicas(model) == {}


def with_trainer(folder: str, saved: str) -> tuple[dict[str, float], list[str]]:
    """Run on every rank: train, let a norm drift in every step, save; what differs then, and what was said."""
    from transformers import TrainerCallback, TrainingArguments

    from tp_transformers.trainer import Trainer

    class Drift(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            tp_transformers.local_tensor(model.get_parameter(NORM)).add_(1e-3 * dist.get_rank())

    model = load(folder)
    arguments: dict[str, Any] = {"save_steps": 2, "max_steps": 2, "report_to": [], "use_cpu": True}
    with logged() as said:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(saved, per_device_train_batch_size=2, disable_tqdm=True, **arguments),
            train_dataset=Texts(),
            callbacks=[Drift],
        )
        trainer.train()
        return tp_transformers.debug.check_replicas(model), said


@needs("trainer")
def test_trainer_brings_ranks_together_at_checkpoints(pool, cases, tmp_path) -> None:
    (found, said), (other, quiet) = pool.run(2, with_trainer, cases(9, 3).folder, str(tmp_path))
    assert found == other == {}
    assert any(f"had drifted apart, {NORM} by" in line for line in said)
    assert not any("drifted apart" in line for line in quiet)


def test_one_process_has_nothing_to_compare(cases) -> None:
    assert tp_transformers.debug.check_replicas(load(cases(9, 3).folder)) == {}
    with pytest.raises(tp_transformers.UnsupportedError, match="check_replicas"):
        tp_transformers.debug.check_replicas(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


SAVES = {
    "generate": lambda model, folder: model.generate(PROMPTS, max_new_tokens=1, do_sample=False),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "save_sharded": lambda model, folder: tp_transformers.save_sharded(model, folder),
}


def told(folder: str, target: str, call: str, names: list[str], alike: bool) -> tuple[list[str], dict[str, float]]:
    """Runs on every rank: what is logged by a call after random numbers in place of parameters, and what differs."""
    model = load(folder)
    torch.manual_seed(3 if alike else model.tp_group.rank)
    for name in names:
        nn.init.normal_(model.get_parameter(name))
    with logged() as texts:
        SAVES[call](model, Path(target))
    return [text for text in texts if "other values" in text], tp_transformers.debug.check_replicas(model)


@needs("full_parameters")
@pytest.mark.parametrize(
    ("heads", "call", "name"),
    [
        ((9, 3), "generate", NORM),
        ((8, 1), "generate", KEYS),
        ((9, 3), "save_pretrained", NORM),
        pytest.param((8, 4), "save_sharded", NORM, marks=pytest.mark.slow),
    ],
)
def test_drift_is_told(pool, cases, tmp_path, heads, call, name) -> None:
    (texts, drifted), (others, _) = pool.run(2, told, cases(*heads).folder, str(tmp_path / "a"), call, [name], False)
    assert list(drifted) == [name]
    assert len(texts) == 1
    assert name in texts[0]
    assert not others


@needs("data_parallel", "full_parameters")
def test_numbers_of_one_seed_do_not_drift(pool, cases, tmp_path) -> None:
    names = [NORM, KEYS, "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"]
    for texts, drifted in pool.run(2, told, cases(8, 1).folder, str(tmp_path / "a"), "generate", names, True):
        assert texts == []
        assert drifted == {}
