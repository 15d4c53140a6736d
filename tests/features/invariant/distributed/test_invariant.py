"""Invariant plans: every bit of logits, tokens, losses, gradient norms, gradients and trained weights of one process.

The reference is transformers without a plan, in one process with one thread, as each rank has.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import tp_transformers
from tests.support.invariance import MODELS, auto_class, has_bits, observe, prompts, save
from tests.support.models import load
from tests.support.on_ranks import on_ranks
from tests.support.pool import WorkerError
from tests.support.tiers import wide
from tp_transformers.features.verify.small_models.model import on_threads
from tp_transformers.plans.bind import resolve
from tp_transformers.strategies import STRATEGIES, RowwiseParallel

QUICK = [
    ("llama", 3, "float32", None),
    ("mixtral", 2, "bfloat16", "eager"),
]
CASES = [
    *QUICK,
    ("deepseek_v3", 2, "bfloat16", "grouped_mm"),
    *((name, size, dtype, None) for name in MODELS for size in (2, 3, 4) for dtype in ("float32", "bfloat16")),
    *((name, size, "float32", "eager") for name in ("mixtral", "deepseek_v3", "gpt_oss") for size in (2, 4)),
    *((name, 2, dtype, "batched_mm") for name in ("mixtral", "deepseek_v3") for dtype in ("float32", "bfloat16")),
]
"""(model, ranks, dtype, implementation of its experts)."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`checkpoint(name)` is the folder of a random model."""
    return functools.cache(functools.partial(save, tmp_path_factory))


def write_reference(folder: str, dtype: str, experts: str | None, file: Path) -> None:
    """What one process computes, without a plan, from weights that are aligned in memory."""
    options = {} if experts is None else {"experts_implementation": experts}
    auto = auto_class(transformers.AutoConfig.from_pretrained(folder))
    model = auto.from_pretrained(folder, dtype=getattr(torch, dtype), **options)
    for param in model.parameters():
        param.data = param.data.clone()
    with on_threads(1):
        torch.save(observe(model), file)


def differing(folder: str, dtype: str, experts: str | None, file: Path, **plan: Any) -> list[str]:
    """Run on every rank: names of what has other bits than one process."""
    options = plan if experts is None else {"experts_implementation": experts, **plan}
    with on_threads(1):
        auto = auto_class(transformers.AutoConfig.from_pretrained(folder))
        seen = observe(load(folder, auto=auto, dtype=getattr(torch, dtype), **options))
    expected = torch.load(file)
    assert seen.keys() == expected.keys()
    return [name for name, value in expected.items() if not has_bits(seen[name], value)]


@pytest.fixture
def reference(model: str, dtype: str, experts: str | None, tmp_path: Path) -> Path:
    """The file of what one process computes."""
    write_reference(model, dtype, experts, tmp_path / "reference")
    return tmp_path / "reference"


@pytest.fixture
def model(checkpoint: Any, name: str) -> str:
    """The folder of the model of a test."""
    return checkpoint(name)


@pytest.mark.parametrize(("name", "size", "dtype", "experts"), wide(dict.fromkeys(CASES), quick=len(QUICK)))
@on_ranks()
def test_every_bit_is_that_of_one_process(model, dtype, experts, reference) -> None:
    assert differing(model, dtype, experts, reference, tp_invariant=True) == []


@pytest.mark.parametrize(("name", "size", "dtype", "experts"), [("llama", 3, "float32", None)])
@on_ranks()
def test_the_usual_plan_has_other_bits(model, dtype, experts, reference) -> None:
    assert {"logits of 48", "norm 0"} <= set(differing(model, dtype, experts, reference))


def autocast(folder: str, experts: str, **plan: Any) -> torch.Tensor:
    """Run on every rank: logits under autocast, which rounds the routing weights of Qwen3-MoE."""
    model = load(folder, experts_implementation=experts, **plan)
    with on_threads(1), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits: torch.Tensor = model(prompts(model)[0]).logits
    return logits


def test_experts_under_autocast(pool, checkpoint) -> None:
    folder = checkpoint("qwen3_moe")
    made = pool.run(2, functools.partial(autocast, tp_invariant=True), folder, "grouped_mm")
    assert all(has_bits(logits, autocast(folder, "grouped_mm", tp_plan=None)) for logits in made)
    for experts in ("eager", "batched_mm"):
        with pytest.raises(WorkerError) as raised:
            pool.run(2, functools.partial(autocast, tp_invariant=True), folder, experts)
        error = f"{experts}, with tp_invariant and routing weights of torch.bfloat16 for tokens of torch.float32"
        assert [error in own for own in raised.value.errors.values()] == [True, True]


ADAPTERS = [
    peft.LoraConfig(target_modules=["q_proj"]),
    peft.LoraConfig(target_modules=["embed_tokens"]),
    peft.LoraConfig(target_modules=[], target_parameters=["mlp.experts.down_proj"]),
    peft.LNTuningConfig(target_modules=["input_layernorm"]),
    peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
]


@pytest.mark.parametrize("name", ["mixtral"])
@pytest.mark.parametrize("config", ADAPTERS)
@on_ranks()
def test_adapters_are_refused(model, config) -> None:
    with pytest.raises(tp_transformers.UnsupportedError, match="an adapter with tp_invariant=True"):
        peft.get_peft_model(load(model, tp_invariant=True), config)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {"tp_sequence_parallel": True}, "invariant and sequence_parallel"),
        ("llama", {"tp_loss_parallel": True}, "invariant and loss_parallel"),
        ("mixtral", {"size": 6}, "5 experts are fewer than 6 ranks"),
    ],
)
def test_refusals(checkpoint, name, options, reason) -> None:
    folder, size = checkpoint(name), options.pop("size", 2)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    plan = tp_transformers.plans.Plan.for_model(model)
    changed = {option.removeprefix("tp_"): value for option, value in options.items()}
    with pytest.raises(tp_transformers.PlanError, match=reason):
        resolve(plan.with_options(invariant=True, **changed), model, size)


def test_a_conv1d_of_a_width_that_is_no_multiple_of_4_is_refused() -> None:
    """Bits of 2 rows, with all columns and with the first 64, differ on a CPU: FUZZ=10 found it."""
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_head=4, n_layer=1, n_inner=129)
    model = transformers.GPT2LMHeadModel(config)
    plan = tp_transformers.plans.Plan.for_model(model)
    with pytest.raises(tp_transformers.PlanError, match="129 output features, no multiple of 4"):
        resolve(plan.with_options(invariant=True), model, 2)
    model.config.n_inner = config.n_inner = 128
    resolve(plan.with_options(invariant=True), transformers.GPT2LMHeadModel(config), 2)


class Own(RowwiseParallel):
    """A strategy that says nothing of its order."""


class OwnInOrder(Own):
    """One that keeps the order of one process."""

    keeps_order = True


@pytest.mark.parametrize(("own", "is_refused"), [(Own, True), (OwnInOrder, False)])
def test_own_strategies_have_to_keep_the_order(checkpoint, monkeypatch, own, is_refused) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(checkpoint("llama")))
    plan = tp_transformers.plans.Plan.for_model(model).with_options(invariant=True)
    monkeypatch.setitem(STRATEGIES, "rowwise", own())
    if is_refused:
        with pytest.raises(tp_transformers.PlanError, match="down_proj: rowwise has no invariant form"):
            resolve(plan, model, 2)
    else:
        assert isinstance(resolve(plan, model, 2).module_strategies["model.layers.0.mlp.down_proj"], OwnInOrder)
