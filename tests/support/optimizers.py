"""Every optimizer of torch and of transformers' Trainer, on shards and in one process, with the same gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.training_args import OptimizerNames

import tp_transformers
from tests.support.comparisons import relative
from tests.support.models import PROMPTS, load

T = TypeVar("T")
STEPS = 3

# Arguments without which an optimizer hardly moves, or moves by the sign of a gradient alone.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "eps": 1e-2},
    "Muon": {"lr": 1e-2},
}


def torch_optimizers() -> list[str]:
    """Every optimizer of torch, and those that compute many tensors at a time in that way, too."""
    names = []
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            options = inspect.signature(kind).parameters
            names += [name, *(f"{name} {option}" for option in ("foreach", "fused") if option in options)]
    return sorted(names)


def trainer_optimizers() -> list[str]:
    """Every value of Trainer's `optim`."""
    return [each.value for each in OptimizerNames]


def of_torch(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of torch for all parameters; "AdamW fused" with `fused=True`."""
    name, _, option = name.partition(" ")
    params = [param for param in model.parameters() if param.ndim == 2 or name != "Muon"]
    options = {**ARGUMENTS.get(name, {}), **({option: True} if option else {})}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(params, **options)
    return optimizer


def of_trainer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that transformers' Trainer makes of `optim=name`."""
    from transformers import Trainer, TrainingArguments

    low_rank = name.startswith(("galore", "apollo"))
    arguments = TrainingArguments(
        "unused",
        optim=name,
        optim_args="rank=4,update_proj_gap=2" if low_rank else None,
        optim_target_modules=["q_proj", "o_proj", "down_proj"] if low_rank else None,
        learning_rate=1e-2,
        adam_epsilon=1e-2,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    optimizer: torch.optim.Optimizer = Trainer(model=model, args=arguments).create_optimizer()
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


class Comparison:
    """A model on this rank's shards and in one process, which take the same steps, again and again from the start.

    One process steps by the gradients that the ranks have, gathered: what differs is due to the optimizer alone.
    """

    def __init__(self, folder: str, change: Callable[[Any], object] = lambda model: None, **options: Any) -> None:
        """Load both; `change` is called with the model of the ranks, `options` are those of its load."""
        self.model, self.plain = load(folder, **options), AutoModelForCausalLM.from_pretrained(folder)
        change(self.model)
        self.begin = [tp_transformers.local_tensor(param).clone() for param in self.model.parameters()]
        self.whole = [param.detach().clone() for param in self.plain.parameters()]

    def restart(self) -> None:
        """Give both their first values."""
        for model, begin in ((self.model, self.begin), (self.plain, self.whole)):
            for param, value in zip(model.parameters(), begin, strict=True):
                tp_transformers.local_tensor(param).copy_(value)
                param.grad = None

    def optimizers(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[Any, Any]:
        """What `make` makes for the ranks' model, and for that of one process."""
        torch.manual_seed(7)
        try:
            optimizer = make(self.model)
        except tp_transformers.TensorParallelError:
            raise
        except Exception:
            alone(lambda: make(self.plain))
            raise
        torch.manual_seed(7)
        return optimizer, alone(lambda: make(self.plain))

    def step(self, optimizer: Any, reference: Any, closure: bool = False) -> None:
        """One step of both, after the same draws; `closure`: both are given one."""
        seen: list[tuple[Tensor, list[Tensor | None]]] = []

        def compute() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = self.model(PROMPTS, labels=PROMPTS).loss
            loss.backward()
            grads = [tp_transformers.full_tensor(param, param.grad) for param in self.model.parameters()]
            seen.append((loss.detach(), grads))
            return loss

        def repeat() -> Tensor:
            loss, grads = seen.pop(0)
            for param, grad in zip(self.plain.parameters(), grads, strict=True):
                param.grad = grad
            return loss

        if closure:
            torch.manual_seed(11)
            optimizer.step(compute)
            torch.manual_seed(11)
            reference.step(repeat)
        else:
            compute()
            repeat()
            torch.manual_seed(11)
            alone(reference.step)
            torch.manual_seed(11)
            optimizer.step()

    def error(self, difference: Callable[[Tensor, Tensor], float] = relative) -> float:
        """The largest `difference` of any parameter's update from that of one process."""
        worst = 0.0
        for param, other, begin in zip(self.model.parameters(), self.plain.parameters(), self.whole, strict=True):
            update, expected = tp_transformers.full_tensor(param) - begin, other.detach() - begin
            worst = max(worst, difference(update, expected)) if expected.any() or update.any() else worst
        return worst

    def of(
        self,
        make: Callable[[nn.Module], torch.optim.Optimizer],
        closure: bool = False,
        difference: Callable[[Tensor, Tensor], float] = relative,
    ) -> float:
        """The error after some steps of an optimizer."""
        self.restart()
        pair = self.optimizers(make)
        for _ in range(STEPS):
            self.step(*pair, closure)
        return self.error(difference)


def of_norms(value: Tensor, reference: Tensor) -> float:
    """The norm of the difference, relative to that of the reference; infinite where it is not a number."""
    difference = ((value - reference).norm() / reference.norm().clamp_min(1e-12)).item()
    return difference if difference == difference else float("inf")


class FailsAloneError(Exception):
    """What one process cannot do either: a package is not there, or needs a GPU."""


def alone(function: Callable[[], T]) -> T:
    """What `function` returns, which has nothing to do with ranks."""
    try:
        return function()
    except Exception as error:
        raise FailsAloneError(f"alone, {text_of(error)}") from error


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def outcome(compute: Callable[[], float]) -> float | str:
    """What `compute` returns, or the error that it raises, as a row of a table has it."""
    try:
        return compute()
    except FailsAloneError as error:
        return str(error)
    except Exception as error:
        return text_of(error)
