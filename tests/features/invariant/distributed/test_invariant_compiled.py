"""Invariant plans under torch.compile: one graph, with every bit of one process that is compiled the same way."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

from tests.support import compiling
from tests.support.invariance import has_bits, prompts, save, train
from tests.support.models import load
from tests.support.pool import WorkerError
from tests.support.tiers import wide
from tp_transformers.features.verify.small_models.model import on_threads

COMPILING = 600.0
"""Seconds for the ranks of one model that Inductor compiles."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`checkpoint(name)` is the folder of a random model."""

    @functools.cache
    def make(name: str) -> str:
        if name == "one layer":
            return save(tmp_path_factory, "llama", num_hidden_layers=1)
        return save(tmp_path_factory, name)

    return make


def compiled(folder: str, file: Path, dynamic: bool, options: dict[str, Any]) -> list[str]:
    """Run on every rank: phases of a compiled model that are several graphs, or have other bits than one process."""
    with on_threads(1), torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        seen = compiling.observe(load(folder, tp_invariant=True, **options), "eager", ("prefill", "train"))
    expected = torch.load(file, weights_only=False)
    return [name for name, made in seen.items() if made.graphs != 1 or not has_bits(made.value, expected[name].value)]


COMPILED = [
    ("one layer", False, {}),
    ("llama", False, {}),
    ("mixtral", False, {}),
    ("mixtral", False, {"experts_implementation": "batched_mm"}),
    ("qwen3", True, {}),
    ("phi3", False, {}),
    ("olmo2", True, {}),
    ("gemma3", False, {}),
]
"""(model, whether its graph is for all lengths, options of the load)."""


@pytest.mark.parametrize(("name", "dynamic", "options"), wide(COMPILED, quick=1))
def test_a_compiled_model_is_one_graph(pool, checkpoint, tmp_path, name, dynamic, options) -> None:
    folder, file = checkpoint(name), tmp_path / "reference"
    with on_threads(1):
        torch.save(compiling.observe(load(folder, tp_plan=None, **options), None, ("prefill", "train")), file)
    assert pool.run(2, compiled, folder, file, dynamic, options) == [[], []]


def train_compiled(folder: str) -> float:
    """Run on every rank: a compiled training step with dropout between sharded linears."""
    torch._dynamo.reset()
    model = load(folder, tp_invariant=True).train()
    loss: float = torch.compile(model, backend="eager")(prompts(model)[0], labels=prompts(model)[0]).loss.item()
    return loss


@pytest.mark.slow
def test_dropout_of_a_compiled_model_is_refused(pool, checkpoint) -> None:
    with pytest.raises(WorkerError) as raised:  # the other rank raises it, too, or that this one failed
        pool.run(2, train_compiled, checkpoint("gpt2"))
    error = "UnsupportedError: dropout with tp_invariant=True: got torch.compile"
    assert len(raised.value.errors) == 2
    assert any(own.startswith(error) for own in raised.value.errors.values())


def through_inductor(folder: str, dtype: str, file: Path, **plan: Any) -> list[str]:
    """Run on every rank: names of what a compiled model has with other bits than one process, which writes `file`.

    A prefill with left padding, and two training steps.
    """
    torch._inductor.config.compile_threads = 1  # more are processes that each import torch
    torch._dynamo.reset()
    with on_threads(1), torch._inductor.config.patch(emulate_precision_casts=True):
        model = load(folder, dtype=getattr(torch, dtype), **plan)
        for param in model.parameters() if not file.exists() else ():
            param.data = param.data.clone()
        forward, (ids, mask) = torch.compile(model.forward), prompts(model)
        with torch.no_grad():
            seen = {"padded logits": forward(ids, attention_mask=mask).logits}
        seen |= train(model, forward, ids, 2)
    if not file.exists():
        torch.save(seen, file)
    expected = torch.load(file)
    return [name for name, value in seen.items() if not has_bits(value, expected[name])]


def invariant_through_inductor(*arguments: Any) -> list[str]:
    return through_inductor(*arguments, tp_invariant=True)


def alone_through_inductor(*arguments: Any) -> list[str]:
    return through_inductor(*arguments, tp_plan=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    [
        ("mixtral", 2, "float32"),
        ("gemma3", 3, "float32"),
        ("llama", 4, "float32"),
        ("deepseek_v3", 4, "float32"),
    ],
)
def test_every_bit_is_that_of_one_compiled_process(pool, checkpoint, tmp_path, name, size, dtype) -> None:
    folder, file = checkpoint(name), tmp_path / "reference"
    pool.run(1, alone_through_inductor, folder, dtype, file, timeout=COMPILING)
    assert pool.run(size, invariant_through_inductor, folder, dtype, file, timeout=COMPILING) == [[]] * size
