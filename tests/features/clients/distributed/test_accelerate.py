"""Saves and loads of accelerate, in the order in which people call them, give the files of one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.comparisons import read_folder, relative
from tests.support.models import load
from tests.support.tiers import wide
from tests.support.training import BATCH, LOSS_TOLERANCE, WEIGHT_TOLERANCE, mesh_of


class Run:
    """A model in an accelerator's hands; `copies`: of the model, 0 for one process."""

    def __init__(self, folder: str, copies: int, adapted: bool = False, mode: Any = "replicate") -> None:
        from accelerate import Accelerator
        from accelerate.utils import ParallelismConfig

        options: dict[str, Any] = {}
        if copies:
            ParallelismConfig._validate_accelerator = lambda *_: None  # type: ignore[assignment]  # it rejects CPUs
            mesh = mesh_of(copies)
            model = load(folder, device_mesh=mesh)
            size = mesh["tp"].size()
            options["parallelism_config"] = ParallelismConfig(tp_size=size, dp_shard_size=copies)
        else:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name)
            model = AutoModelForCausalLM.from_pretrained(folder)
        if adapted:
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False))
        if copies > 1:
            tp_transformers.data_parallel(model, mesh, mode=mode)
        self.accelerator = Accelerator(cpu=True, **options)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-2)
        if copies > 1:  # FSDP is not accelerate's
            self.model, self.optimizer = model, self.accelerator.prepare(optimizer)
            self.accelerator._models.append(model)
        else:
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        # accelerate steps once a copy, since the copies share an epoch
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(copies, 1), gamma=0.5)
        self.schedule = self.accelerator.prepare(schedule)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(BATCH, labels=BATCH).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def saved(
    folder: str, target: str, copies: int, safe: bool, adapted: bool = False, mode: Any = "replicate"
) -> list[float]:
    """Run on every rank: two steps, every kind of save, and the losses of two more steps."""
    run = Run(folder, copies, adapted, mode)
    run.train(2)
    run.accelerator.save_state(f"{target}/state", safe_serialization=safe)
    run.accelerator.save_model(run.model, f"{target}/model", safe_serialization=safe)
    run.accelerator.unwrap_model(run.model).save_pretrained(
        f"{target}/idiom",
        is_main_process=run.accelerator.is_main_process,
        save_function=run.accelerator.save,
        state_dict=run.accelerator.get_state_dict(run.model),
    )
    if not copies or mode == "replicate":
        own = {name: value * 2 for name, value in run.model.state_dict().items()}
        run.model.save_pretrained(f"{target}/own", state_dict=own if not adapted else run.model.state_dict())
    run.accelerator.wait_for_everyone()
    return run.train(2)


def resumed(folder: str, target: str, copies: int, adapted: bool = False, mode: Any = "replicate") -> list[float]:
    """Run on every rank: the losses of two steps from the saved state."""
    run = Run(folder, copies, adapted, mode)
    run.accelerator.load_state(f"{target}/state")
    return run.train(2)


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, in either format."""
    pickles = {file.name: torch.load(file, weights_only=True) for file in folder.glob("pytorch_model*.bin")}
    return {name: value for state in pickles.values() for name, value in state.items()} or read_folder(folder)


@pytest.mark.parametrize(
    ("tied", "adapted", "safe", "copies", "mode"),
    wide(
        [
            (False, False, True, 1, "replicate"),
            (True, False, False, 1, "replicate"),
            (True, False, True, 1, "replicate"),
            (False, True, True, 1, "replicate"),
            (False, False, True, 2, "replicate"),
            (False, False, True, 2, "shard"),
        ],
        1,
    ),
)
def test_accelerate_saves_and_resumes_as_one_process(pool, cases, tmp_path, tied, adapted, safe, copies, mode) -> None:
    folder, one, cut = cases(9, 3, tie_word_embeddings=tied).folder, tmp_path / "one", tmp_path / "cut"
    (expected,) = pool.run(1, saved, folder, str(one), 0, safe, adapted)
    for losses in pool.run(2 * copies, saved, folder, str(cut), copies, safe, adapted, mode):
        assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE)
    for name in sorted(path.name for path in cut.iterdir()):
        names = [{path.name for path in (run / name).iterdir() if "random" not in path.name} for run in (cut, one)]
        assert names[0] == names[1]  # every rank writes its random states
        ours, theirs = files_of(cut / name), files_of(one / name)
        assert ours.keys() == theirs.keys(), name
        assert max(relative(ours[key], theirs[key]) for key in theirs) < WEIGHT_TOLERANCE, name
    for losses in pool.run(2 * copies, resumed, folder, str(cut), copies, adapted, mode):
        assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE)
    if copies == 1:  # on another number of ranks, and in one process
        for size, number in ((3, 1), (1, 0)):
            for losses in pool.run(size, resumed, folder, str(cut), number, adapted):
                assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE)
