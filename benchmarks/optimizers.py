"""One rank of `bench_optimizers`: `python -m benchmarks.optimizers JOB` trains with every optimizer, and compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM, LlamaConfig

import tp_transformers
from tp_transformers.features.verify.differences import relative

from . import rank
from .adapters import batch

STEPS, MORE = 20, 5


@dataclass(frozen=True)
class Job:
    """The job of one rank: the optimizers, and the folder of their states."""

    folder: str
    optimizers: list[str]
    states: str
    """Folder of the states, one for each optimizer, that the size before left; this size replaces them."""
    size: int
    rank: int
    store: str
    """A file by which the ranks meet."""
    result: str = ""


Params = list[nn.Parameter]


def _of(package: str, name: str, **options: Any) -> Callable[[Params], torch.optim.Optimizer]:
    def make(params: Params) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(import_module(package), name)(params, **options)
        return optimizer

    return make


def _galore(params: Params) -> torch.optim.Optimizer:
    from galore_torch import GaLoreAdamW

    low_rank = {"rank": 4, "update_proj_gap": 10, "scale": 1.0, "proj_type": "std"}
    groups = [
        {"params": [param for param in params if param.ndim == 1]},
        {"params": [param for param in params if param.ndim == 2], **low_rank},
    ]
    optimizer: torch.optim.Optimizer = GaLoreAdamW(groups, lr=1e-2, eps=1e-2)
    return optimizer


MODEL = LlamaConfig(
    vocab_size=256,
    hidden_size=144,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=16,
    initializer_range=0.07,
)
"""Most of its shards are large enough for states in 8 bits."""

# A large epsilon where there is one: steps that go by the sign of a gradient alone would show rounding.
OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "AdamW, torch": _of("torch.optim", "AdamW", lr=1e-2, eps=1e-2),
    "Muon, torch": lambda params: torch.optim.Muon([param for param in params if param.ndim == 2], lr=1e-2),
    "Adafactor, transformers": _of("transformers", "Adafactor", lr=1e-3, relative_step=False, scale_parameter=False),
    "Lion, pytorch_optimizer": _of("pytorch_optimizer", "Lion", lr=1e-3),
    "AdamW8bit, bitsandbytes": _of("bitsandbytes.optim", "AdamW8bit", lr=1e-2, eps=1e-2, min_8bit_size=64),
    "AdamW8bit, torchao": _of("torchao.optim", "AdamW8bit", lr=1e-2, eps=1e-2),
    "AdamWScheduleFree, schedulefree": _of("schedulefree", "AdamWScheduleFree", lr=1e-2, eps=1e-2),
    "SOAP, pytorch_optimizer": _of("pytorch_optimizer", "SOAP", lr=1e-3, eps=1e-2),
    "Shampoo, pytorch_optimizer": _of("pytorch_optimizer", "Shampoo", lr=1e-2, matrix_eps=1e-2),
    "GaLoreAdamW, galore_torch": _galore,
    "LBFGS, torch": _of("torch.optim", "LBFGS", lr=0.1, max_iter=2, history_size=4),
}
"""Name and package of an optimizer -> one for the parameters of a model."""


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    rank.run(job, lambda: {name: compare(job, name) for name in job.optimizers})


def compare(job: Job, name: str) -> dict[str, Any] | None:
    """Train with one optimizer on ranks and in one process: differences, bytes of states; None if not installed."""
    try:
        one = Run(AutoModelForCausalLM.from_pretrained(job.folder), name)
    except ImportError:
        return None
    reordered = Run(AutoModelForCausalLM.from_pretrained(job.folder), name, reverse=True)
    ours = Run(AutoModelForCausalLM.from_pretrained(job.folder, tp_plan="auto"), name)
    for run in (one, reordered, ours):
        run.train(STEPS)
    found = {**ours.differences(one), "rounding": reordered.differences(one)}
    found |= {"fell": [one.losses[0], one.losses[-1]], "bytes": ours.nbytes(), "bytes of one process": one.nbytes()}
    state = f"{job.states}/{name}"
    if Path(state).exists():
        resumed = Run(AutoModelForCausalLM.from_pretrained(job.folder, tp_plan="auto"), name)
        resumed.load(state)
        one.train(MORE)
        resumed.train(MORE)
        found["resumed"] = max(map(_difference, resumed.losses, one.losses[STEPS:]))
    dist.barrier()
    try:
        ours.save(state)
    except tp_transformers.UnsupportedError as error:
        found["not saved"] = str(error)
    return found


class Run:
    """A model that an optimizer trains, with an exponential moving average of its weights."""

    def __init__(self, model: Any, name: str, *, reverse: bool = False) -> None:
        """`reverse`: the samples come in reverse order, so that their sums differ by rounding alone."""
        self.model = model.train()
        self.optimizer = OPTIMIZERS[name](list(model.parameters()))
        if hasattr(self.optimizer, "train"):  # schedule-free ones
            self.optimizer.train()
        self.batch = {key: value.flip(0) if reverse else value for key, value in batch().items()}
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(float(self.optimizer.step(self._loss)))  # type: ignore[arg-type]
            self.average.update_parameters(self.model)

    @torch.enable_grad()  # some optimizers call it without
    def _loss(self) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(**self.batch).loss
        loss.backward()
        return loss.detach()

    def differences(self, one: Run) -> dict[str, float]:
        """Of every step's loss, and of the weights and their average after the last step."""
        return {
            "losses": max(map(_difference, self.losses, one.losses)),
            "weights": _largest(self.model, one.model),
            "average": _largest(self.average.module, one.average.module),
        }

    def nbytes(self) -> int:
        """Bytes of this rank's states."""
        tensors = (part for state in self.optimizer.state.values() for part in _tensors(state))
        return sum({value.data_ptr(): value.nbytes for value in tensors}.values())

    def save(self, folder: str) -> None:
        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        state = self._state()
        tp_transformers.checkpoint.load_distributed_checkpoint(state, folder)
        tp_transformers.training.load_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def _state(self) -> dict[str, Any]:
        states = tp_transformers.training.optimizer_state_dict(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "optimizer": states}


def _difference(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


def _largest(model: nn.Module, plain: nn.Module) -> float:
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(relative(tp_transformers.full_tensor(param), other) for param, other in pairs)


def _tensors(value: Any) -> Iterator[Tensor]:
    """This rank's plain tensors in a state, also those in its lists and objects, and the codes of quantised ones."""
    if isinstance(value, Tensor):
        local = tp_transformers.local_tensor(value)
        if type(local) in (Tensor, nn.Parameter):
            yield local
        else:
            yield from (getattr(local, name) for name in local.__tensor_flatten__()[0])  # type: ignore[attr-defined]
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


if __name__ == "__main__":
    main()
