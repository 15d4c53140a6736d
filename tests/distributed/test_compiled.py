"""Every architecture compiled: no graph break that one process has not, and the numbers of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor.debug import CommDebugMode

import tp_transformers
from tests.support.architectures import ARCHITECTURES, GRADIENT_TOLERANCE, LOGITS_TOLERANCE
from tests.support.comparisons import gradient_differences, gradient_errors, relative
from tests.support.compiling import PHASES, observe
from tests.support.models import PROMPTS, load, load_both, save_as_loaded
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.pool import Pool
from tests.support.tiers import wide
from tests.support.tiny import MODELS
from tests.support.tiny_mixers import MIXERS

TIMEOUT = 900.0
"""Seconds for the ranks of one model: Inductor's C++ compiler may share the machine with others."""
THREE_RANKS = (
    "llama",
    "mixtral",
    "qwen3",
    "gemma2",
    "olmo2",
    "phi3",
    "gpt_oss",
    "cohere with q/k norms",
    "llama4_text",
    "falcon",
)
NO_STATIC_CACHE = ("falcon with alibi",)
"""Architectures whose own code takes no mask of a static cache."""
INDUCTOR: list[Any] = [
    pytest.param("mixtral", (9, 3), ("decode",), {}),
    pytest.param("olmo2", (9, 3), ("decode",), {}),
    pytest.param("llama", (9, 3), ("decode", "train"), {}),
    pytest.param("llama", (8, 4), ("decode", "train"), {}),
    pytest.param("llama", (8, 4), ("train",), {"tp_sequence_parallel": True}, marks=needs("sequence")),
]
"""Experts, norms over features that are cut, and a training, also of DTensors (8 heads); what, options of the load."""

BREAKS = pytest.mark.xfail(reason="a rank keeps its part of a state in a tuple by Tensor.data, which is not traced")


def make(name: str, heads: tuple[int, int]) -> Any:
    """A random model in fp32 that drops nothing: ranks draw their own numbers for what they hold."""
    if name in ARCHITECTURES:
        model = ARCHITECTURES[name].make(*heads)
    else:
        model = MIXERS[name].make(*heads).float() if name in MIXERS else MODELS[name].make()
    for config in (model.config, *(getattr(model.config, part) for part in model.config.sub_configs)):
        for setting, value in vars(config).items():
            if "drop" in setting and isinstance(value, float):
                setattr(config, setting, 0.0)
    return model


def compile_and_compare(
    kind: str, folder: str, reference: str, backend: str, which: Sequence[str], options: Mapping[str, bool]
) -> dict[str, dict[str, Any]]:
    """Run on every rank: the graphs and the graph breaks of each phase, and the largest differences from eager ones of
    one process.
    """
    model = load(folder, getattr(transformers, kind), **options)
    expected, found = torch.load(reference, weights_only=False), {}
    for phase, made in observe(model, backend, which).items():
        own = expected[phase]
        found[phase] = {
            "graphs": made.graphs,
            "breaks": made.breaks,
            "value": relative(made.value, own.value),
            "tokens": own.tokens is None or torch.equal(made.tokens, own.tokens),
            "grads": max(gradient_errors(model, made.grads, own.grads).values(), default=0.0),
        }
    return found


def check(
    pool: Pool,
    path: Path,
    size: int,
    name: str,
    heads: tuple[int, int],
    *,
    backend: str = "eager",
    which: Sequence[str] = PHASES,
    options: Mapping[str, bool] = MappingProxyType({}),
) -> None:
    """Compare the graphs of `size` ranks with those of one process, and their numbers with its eager ones."""
    model = save_as_loaded(make(name, heads), path)
    torch.save(observe(model, None, which), path / "reference.pt")
    plain = observe(model, "eager", which)
    files = str(path / "checkpoint"), str(path / "reference.pt")
    arguments = (type(model).__name__, *files, backend, which, dict(options))
    for result in pool.run(size, compile_and_compare, *arguments, timeout=TIMEOUT):
        for phase, own in plain.items():
            seen, breaks = result[phase], sum(own.breaks.values())
            print(f"{name}, {phase}: {own.graphs} graphs, {breaks} breaks in one process, on {size} ranks", seen)
            assert own.graphs > 0 or phase == "decode"  # transformers compiles no decoding of Llama 4
            assert seen["graphs"] <= own.graphs
            assert seen["breaks"].keys() <= own.breaks.keys()
            assert seen["value"] < LOGITS_TOLERANCE
            assert seen["tokens"]
            assert seen["grads"] < GRADIENT_TOLERANCE


def test_decoding_is_one_graph(pool, tmp_path) -> None:
    check(pool, tmp_path, 2, "llama", (9, 3), which=("decode",))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_graphs_and_numbers_are_those_of_one_process(pool, tmp_path, name) -> None:
    which = [phase for phase in PHASES if phase != "decode" or name not in NO_STATIC_CACHE]
    check(pool, tmp_path, 2, name, ARCHITECTURES[name].variants[-1], which=which)  # 9 heads


@pytest.mark.slow
@pytest.mark.parametrize("name", THREE_RANKS)
def test_graphs_on_three_ranks(pool, tmp_path, name) -> None:
    check(pool, tmp_path, 3, name, (9, 3))


@pytest.mark.slow
def test_graphs_of_heads_that_all_ranks_share(pool, tmp_path) -> None:
    check(pool, tmp_path, 2, "llama", (8, 1), backend="aot_eager")


@pytest.mark.parametrize(
    ("name", "groups"),
    wide(
        [
            ("mamba2", 2),
            *((name, 2) for name in MIXERS if name not in ("mamba2", "xlstm")),
            ("bamba", 1),
            pytest.param("xlstm", 2, marks=BREAKS),
        ],
        quick=0,
    ),
)
def test_graphs_of_mixers(pool, tmp_path, name, groups) -> None:
    check(pool, tmp_path, 2, name, (8, groups))


@pytest.mark.slow
def test_graphs_of_a_model_with_moments_of_cut_features(pool, tmp_path) -> None:
    check(pool, tmp_path, 2, "gemma3n_text", (4, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads", "which", "options"), INDUCTOR)
def test_inductor_computes_as_one_process(pool, tmp_path, name, heads, which, options) -> None:
    check(pool, tmp_path, 2, name, heads, backend="inductor", which=which, options=options)


def drop(folder: str) -> list[dict[str, Any]]:
    """Run on every rank: a training step that drops features, eager and compiled."""
    model, found = load(folder).train(), []
    for forward in (model, torch.compile(model, backend="eager")):
        torch._dynamo.reset()
        torch.manual_seed(3)
        model.zero_grad()
        loss = forward(PROMPTS, labels=PROMPTS).loss
        loss.backward()
        grads = {name: tp_transformers.local_tensor(param.grad) for name, param in model.named_parameters()}
        found.append({**grads, "loss": loss.detach(), "state": torch.get_rng_state()})
    return found


@pytest.mark.slow
def test_a_compiled_model_drops_what_an_eager_one_drops(pool, cases) -> None:
    """Its graph breaks where a rank begins to draw numbers of its own."""
    results = pool.run(2, drop, cases(9, 3, attention_dropout=0.5).folder)
    for eager, compiled in results:
        assert torch.equal(compiled["state"], results[0][0]["state"])
        for name in eager.keys() - {"state"}:
            assert relative(compiled[name], eager[name]) < GRADIENT_TOLERANCE, name


@on_ranks(2)
def test_inductor_trains_plain_shards(folder) -> None:
    """Its kernels are called with the parameters themselves, which compute as full tensors anywhere else."""
    model, alone = load_both(folder)
    mine, whole = (each.model.layers[0].self_attn.k_proj for each in (model, alone))
    inputs = [torch.randn(2, 5, whole.in_features, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    torch._dynamo.reset()
    for module, x in zip((torch.compile(mine, fullgraph=True), whole), inputs, strict=True):
        module(x.requires_grad_()).square().sum().backward()
    weight = tp_transformers.full_tensor(mine.weight, mine.weight.grad)
    assert relative(inputs[0].grad, inputs[1].grad) < 1e-4  # fp32 sums in another order
    assert relative(weight, whole.weight.grad) < 1e-4


@on_ranks(2, num_hidden_layers=9)
def test_layers_that_are_compiled_one_by_one_share_a_graph(folder) -> None:
    """As in one process, in two training steps; more layers than torch.compile compiles a function for would raise."""
    model, alone = load_both(folder)
    torch._dynamo.reset()
    counter = CompileCounter()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    with torch.no_grad():
        model(PROMPTS, use_cache=False)
    assert counter.frame_count == 1, "in inference"
    for each in (model, alone):
        for _ in range(2):
            each.train()(PROMPTS, labels=PROMPTS, use_cache=False).loss.backward()
    assert counter.frame_count == 2
    assert max(gradient_differences(model, alone).values()) < GRADIENT_TOLERANCE


@pytest.mark.slow
@on_ranks(2)
def test_collectives_outside_of_graphs_are_not_compiled(folder) -> None:
    """Beyond the limit, torch.compile leaves the model's forward to Python, and compiles what that calls."""
    model, alone = load_both(folder)
    torch._dynamo.reset()
    forward = torch.compile(model)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=3):
        for length in range(1, 3 * PROMPTS.shape[1]):
            ids = PROMPTS.repeat(1, 3)[:, :length]
            with CommDebugMode() if length % 2 else nullcontext():
                logits = forward(ids).logits
            assert relative(logits, alone(ids).logits) < LOGITS_TOLERANCE, length
