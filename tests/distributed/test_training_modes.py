"""Every way to train, on every kind of model, held against one process that trains on the whole batch.

`MATRIX=1` runs the whole table; else each way is run on one model or more, and each model in one way or more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.architectures import ARCHITECTURES, Variant
from tests.models import VOCAB, relative
from tests.pool import Pool

pytestmark = pytest.mark.distributed

WHOLE_MATRIX = os.environ.get("MATRIX") == "1"
BATCH = torch.randint(3, VOCAB, (4, 9), generator=torch.Generator().manual_seed(3))
STEPS = 5
MAX_NORM = 0.5
"""Far below the norm of the gradients, so that every step is clipped."""


@dataclass(frozen=True)
class Mode:
    """A way to train."""

    copies: int = 1
    """Of the model, each with its part of the batch."""
    parallel: str | None = None
    """The mode of `data_parallel`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `from_pretrained`."""


SEQUENCE, LOSS = {"tp_sequence_parallel": True}, {"tp_loss_parallel": True}
MODES = {
    "tp": Mode(),
    "sequence": Mode(options=SEQUENCE),
    "loss": Mode(options=LOSS),
    "sequence and loss": Mode(options={**SEQUENCE, **LOSS}),
    "replicate": Mode(2, "replicate"),
    "shard": Mode(2, "shard"),
    "replicate, sequence and loss": Mode(2, "replicate", {**SEQUENCE, **LOSS}),
    "shard, sequence and loss": Mode(2, "shard", {**SEQUENCE, **LOSS}),
}


def start(folder: str, mode: Mode) -> tuple[Any, Tensor]:
    """The model in training, and this rank's batch."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    size = dist.get_world_size() // mode.copies
    mesh: DeviceMesh = init_device_mesh("cpu", (mode.copies, size), mesh_dim_names=("dp", "tp"))
    with tp_transformers.enable():
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh, **mode.options).train()
    if mode.parallel is not None:
        tp_transformers.data_parallel(model, mesh, mode=mode.parallel)
    return model, BATCH.chunk(mode.copies)[mesh["dp"].get_local_rank()]


def train(model: Any, groups: Any, batch: Tensor, clip: Any) -> dict[str, Any]:
    """Losses and norms of clipped steps of AdamW, and what they make of the weights."""
    # A large epsilon: steps that go by the sign of a gradient alone would show rounding.
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-2)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch, labels=batch).loss
        loss.backward()
        norms.append(clip(model, MAX_NORM).detach())
        optimizer.step()
        losses.append(loss.detach())
    weights = {name: tp_transformers.full_tensor(param).detach() for name, param in model.named_parameters()}
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "weights": weights}


def compare(folder: str, reference_file: str, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Run on every rank: the largest differences from one process, relative, in every mode."""
    expected, found = torch.load(reference_file), {}
    for name in names:
        model, batch = start(folder, MODES[name])
        seen = train(model, tp_transformers.parameter_groups(model), batch, tp_transformers.clip_grad_norm_)
        dist.all_reduce(seen["losses"])  # copies have parts of equal length
        seen["losses"] /= dist.get_world_size()
        assert seen["weights"].keys() == expected["weights"].keys()
        found[name] = {
            key: ((seen[key] - expected[key]) / expected[key]).abs().max().item() for key in ("losses", "norms")
        }
        found[name]["weights"] = max(relative(seen["weights"][key], w) for key, w in expected["weights"].items())
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`made(name, variant)`: a checkpoint, and the file of what one process trains it to, made once."""
    cases: dict[tuple[str, Variant], tuple[str, str]] = {}

    def make(name: str, variant: Variant) -> tuple[str, str]:
        if (name, variant) not in cases:
            folder: Path = tmp_path_factory.mktemp("case")
            model = ARCHITECTURES[name].make(*variant)
            for setting in model.config.to_dict():
                if "drop" in setting:  # which drops others than one process does
                    setattr(model.config, setting, 0.0)
            model.save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder).train()
            seen = train(
                model,
                model.parameters(),
                BATCH,
                lambda model, norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm),
            )
            torch.save(seen, folder / "reference.pt")
            cases[name, variant] = str(folder), str(folder / "reference.pt")
        return cases[name, variant]

    return make


TENSOR_PARALLEL = tuple(name for name, mode in MODES.items() if mode.copies == 1)
COPIES = tuple(name for name, mode in MODES.items() if mode.copies > 1)
UNEVEN: tuple[Variant, ...] = ((6, 3), (9, 3))
TRAINED = ("mixtral", "qwen3", "phi3", "gemma2", "gpt2")


def table() -> Iterator[tuple[str, Variant, int, tuple[str, ...]]]:
    """(architecture, variant, ranks, modes)."""
    for name in TRAINED:
        yield name, ARCHITECTURES[name].variants[0], 2, TENSOR_PARALLEL
    for variant in UNEVEN:
        yield "llama", variant, 2, TENSOR_PARALLEL
        yield "llama", variant, 4, TENSOR_PARALLEL + COPIES
    for name in TRAINED:
        yield name, ARCHITECTURES[name].variants[-1], 4, TENSOR_PARALLEL + COPIES


@pytest.mark.parametrize(
    ("name", "variant", "size", "modes"),
    [pytest.param(*row, id="-".join(map(str, (row[0], *row[1], row[2])))) for row in table()],
)
def test_trains_as_one_process(
    pool: Pool, made: Any, name: str, variant: Variant, size: int, modes: tuple[str, ...]
) -> None:
    results = pool.run(size, compare, *made(name, variant), modes)
    for mode in modes:
        worst = {key: max(result[mode][key] for result in results) for key in ("losses", "norms", "weights")}
        print(mode, worst)
