"""Invariant plans: every bit of logits, tokens, losses, gradient norms, gradients and trained weights of one process.

The reference is transformers without a plan, in one process with one thread, as each rank has. Widths are those of real
models, since products of a few features have other kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import transformers
from torch import nn

import tp_transformers
from tests.support import compiling
from tests.support.models import load
from tests.support.pool import Pool, WorkerError
from tests.support.tiers import wide
from tp_transformers.plans.bind import resolve
from tp_transformers.small_models.model import on_threads
from tp_transformers.strategies import STRATEGIES, RowwiseParallel

pytestmark = pytest.mark.distributed

WIDTHS = {
    "vocab_size": 1000,
    "hidden_size": 576,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""Those of SmolLM2, with fewer layers and words."""
MIXTURE = WIDTHS | {"intermediate_size": 256, "num_local_experts": 5, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", WIDTHS | {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", MIXTURE),
    "qwen3": ("Qwen3", WIDTHS | {"head_dim": 64}),
    "phi3": ("Phi3", WIDTHS),
    "olmo2": ("Olmo2", WIDTHS | {"num_key_value_heads": 9}),
    "gpt2": (  # with dropout of embeddings, attention and residuals
        "GPT2",
        {"vocab_size": 1003, "n_embd": 576, "n_head": 9, "n_layer": 2, "eos_token_id": None},
    ),
    "gemma3": ("Gemma3Text", WIDTHS | {"head_dim": 64, "sliding_window": 16}),
    "deepseek_v3": (
        "DeepseekV3",
        WIDTHS
        | {"num_key_value_heads": 9, "first_k_dense_replace": 1, "moe_intermediate_size": 256, "n_routed_experts": 8}
        | {"num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "q_lora_rank": 192, "kv_lora_rank": 128}
        | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64},
    ),
    "gpt_oss": (
        "GptOss",
        MIXTURE | {"head_dim": 64, "sliding_window": 16, "rope_parameters": {"rope_type": "default"}},
    ),
    "falcon": ("Falcon", WIDTHS | {"num_kv_heads": 3, "new_decoder_architecture": True, "bias": False}),
    "bloom": (
        "Bloom",
        {"vocab_size": 1000, "hidden_size": 576, "n_layer": 2, "n_head": 9, "eos_token_id": None}
        | {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    ),
    "t5": (  # an encoder and a decoder; with dropout of attention and of its MLPs' features
        "T5",
        {"vocab_size": 1000, "d_model": 576, "d_kv": 64, "num_heads": 9, "d_ff": 768, "num_layers": 2}
        | {"decoder_start_token_id": 0, "eos_token_id": None, "feed_forward_proj": "gated-gelu"},
    ),
}
"""Name -> (prefix of its config class, arguments)."""
QUICK = [
    ("llama", 3, "float32", None),
    ("mixtral", 2, "bfloat16", "eager"),
    ("qwen3", 2, "float32", None),
    ("deepseek_v3", 2, "bfloat16", "grouped_mm"),
]
CASES = [
    *QUICK,
    *((name, size, dtype, None) for name in MODELS for size in (2, 3, 4) for dtype in ("float32", "bfloat16")),
    *((name, size, "float32", "eager") for name in ("mixtral", "deepseek_v3", "gpt_oss") for size in (2, 4)),
    *((name, 2, dtype, "batched_mm") for name in ("mixtral", "deepseek_v3") for dtype in ("float32", "bfloat16")),
]
"""(model, ranks, dtype, implementation of its experts)."""
STEPS = 3
COMPILING = 600.0
"""Seconds for the ranks of one model that Inductor compiles."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`checkpoint(name)` is the folder of a random model."""

    @cache
    def make(name: str) -> str:
        prefix, settings = MODELS[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{prefix}Config")(**settings)
        model = _auto_class(config).from_config(config)
        for param in model.parameters():
            param.data.add_(torch.randn_like(param), alpha=0.1)
        folder = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folder)
        return folder

    return make


def _auto_class(config: transformers.PretrainedConfig) -> Any:
    return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM


def prompts(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask with left padding: (3, 48)."""
    torch.manual_seed(1)
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (3, 48))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return ids, mask


def observe(model: Any, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Logits of 1 to 48 tokens, also left-padded, tokens, and what `train` returns."""
    ids, mask = prompts(model)
    seen: dict[str, torch.Tensor] = {}
    model.eval()
    target = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        for length in (1, 2, 5, 10, 48):
            seen[f"logits of {length}"] = model(ids[:, :length], **target).logits
        seen["padded logits"] = model(ids, attention_mask=mask, **target).logits
    for draws in (False, True):
        options = {"max_new_tokens": 12, "do_sample": draws, "pad_token_id": 0}
        seen[f"tokens, sampled {draws}"] = model.generate(ids[:, :9], attention_mask=mask[:, :9], **options)
    return seen | train(model, model, ids, steps)


def train(model: Any, forward: Callable[..., Any], ids: torch.Tensor, steps: int) -> dict[str, torch.Tensor]:
    """Training by a model's `forward`: losses, norms of gradients, gradients of the first step, weights."""
    full = tp_transformers.full_tensor
    seen: dict[str, torch.Tensor] = {}
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        torch.manual_seed(step)  # of dropout
        loss = forward(ids, labels=ids).loss
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        for name, param in model.named_parameters() if step == 0 else ():
            grad = full(param, param.grad)
            seen |= {} if grad is None else {f"gradient of {name}": grad}
        seen[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return seen | {f"trained {name}": full(param) for name, param in model.named_parameters()}


def write_reference(folder: str, dtype: str, experts: str | None, file: Path) -> None:
    """What one process computes, without a plan, from weights that are aligned in memory."""
    options = {} if experts is None else {"experts_implementation": experts}
    auto = _auto_class(transformers.AutoConfig.from_pretrained(folder))
    model = auto.from_pretrained(folder, dtype=getattr(torch, dtype), **options)
    for param in model.parameters():
        param.data = param.data.clone()
    with on_threads(1):
        torch.save(observe(model), file)


def differing(folder: str, dtype: str, experts: str | None, file: Path, **plan: Any) -> list[str]:
    """Run on every rank: names of what has other bits than one process."""
    options = plan if experts is None else {"experts_implementation": experts, **plan}
    with on_threads(1):
        auto = _auto_class(transformers.AutoConfig.from_pretrained(folder))
        seen = observe(load(folder, auto=auto, dtype=getattr(torch, dtype), **options))
    expected = torch.load(file)
    assert seen.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(seen[name], value)]


@pytest.mark.parametrize(("name", "size", "dtype", "experts"), wide(dict.fromkeys(CASES), quick=len(QUICK)))
def test_every_bit_is_that_of_one_process(
    pool: Pool, checkpoint: Any, tmp_path: Path, name: str, size: int, dtype: str, experts: str | None
) -> None:
    folder, file = checkpoint(name), tmp_path / "reference"
    write_reference(folder, dtype, experts, file)
    assert pool.run(size, invariant, folder, dtype, experts, file) == [[]] * size


def compiled(folder: str, file: Path, dynamic: bool) -> list[str]:
    """Run on every rank: phases of a compiled model that are several graphs, or have other bits than one process."""
    with on_threads(1), torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        seen = compiling.observe(load(folder, tp_invariant=True), "eager", ("prefill", "train"))
    expected = torch.load(file, weights_only=False)
    return [
        name for name, made in seen.items() if made.graphs != 1 or not torch.equal(made.value, expected[name].value)
    ]


DYNAMIC = {"mixtral": False, "llama": False, "qwen3": True, "phi3": False, "olmo2": True, "gemma3": False}
"""Model -> whether its graph is for all lengths."""


@pytest.mark.parametrize(("name", "dynamic"), wide(DYNAMIC.items(), quick=1))
def test_a_compiled_model_is_one_graph(pool: Pool, checkpoint: Any, tmp_path: Path, name: str, dynamic: bool) -> None:
    folder, file = checkpoint(name), tmp_path / "reference"
    with on_threads(1):
        torch.save(compiling.observe(load(folder, tp_plan=None), None, ("prefill", "train")), file)
    assert pool.run(2, compiled, folder, file, dynamic) == [[], []]


def train_compiled(folder: str) -> float:
    """Run on every rank: a compiled training step with dropout between sharded linears."""
    torch._dynamo.reset()
    model = load(folder, tp_invariant=True).train()
    loss: float = torch.compile(model, backend="eager")(prompts(model)[0], labels=prompts(model)[0]).loss.item()
    return loss


def test_dropout_of_a_compiled_model_is_refused(pool: Pool, checkpoint: Any) -> None:
    with pytest.raises(WorkerError) as raised:  # the other rank raises it, too, or that this one failed
        pool.run(2, train_compiled, checkpoint("gpt2"))
    error = "UnsupportedError: dropout with tp_invariant=True: got torch.compile"
    assert len(raised.value.errors) == 2
    assert any(own.startswith(error) for own in raised.value.errors.values())


def invariant(*arguments: Any) -> list[str]:
    return differing(*arguments, tp_invariant=True)


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
    return [name for name, value in seen.items() if not torch.equal(value, expected[name])]


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
def test_every_bit_is_that_of_one_compiled_process(
    pool: Pool, checkpoint: Any, tmp_path: Path, name: str, size: int, dtype: str
) -> None:
    folder, file = checkpoint(name), tmp_path / "reference"
    pool.run(1, alone_through_inductor, folder, dtype, file, timeout=COMPILING)
    assert pool.run(size, invariant_through_inductor, folder, dtype, file, timeout=COMPILING) == [[]] * size


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {"tp_sequence_parallel": True}, "invariant and sequence_parallel"),
        ("llama", {"tp_loss_parallel": True}, "invariant and loss_parallel"),
        ("mixtral", {"size": 6}, "5 experts are fewer than 6 ranks"),
    ],
)
def test_refusals(checkpoint: Any, name: str, options: dict[str, Any], reason: str) -> None:
    folder, size = checkpoint(name), options.pop("size", 2)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    plan = tp_transformers.plans.Plan.for_model(model)
    changed = {option.removeprefix("tp_"): value for option, value in options.items()}
    with pytest.raises(tp_transformers.PlanError, match=reason):
        resolve(replace(plan, invariant=True, **changed), model, size)


def test_the_usual_plan_has_other_bits(pool: Pool, checkpoint: Any, tmp_path: Path) -> None:
    folder, file = checkpoint("llama"), tmp_path / "reference"
    write_reference(folder, "float32", None, file)
    found = pool.run(3, differing, folder, "float32", None, file)[0]
    assert {"logits of 48", "norm 0"} <= set(found)


class Own(RowwiseParallel):
    """A strategy that says nothing of its order."""


class OwnInOrder(Own):
    """One that keeps the order of one process."""

    keeps_order = True


@pytest.mark.parametrize(("own", "is_refused"), [(Own, True), (OwnInOrder, False)])
def test_own_strategies_have_to_keep_the_order(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, own: type[Own], is_refused: bool
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(checkpoint("llama")))
    plan = replace(tp_transformers.plans.Plan.for_model(model), invariant=True)
    monkeypatch.setitem(STRATEGIES.data, "rowwise", own())
    if is_refused:
        with pytest.raises(tp_transformers.PlanError, match="down_proj: rowwise has no invariant form"):
            resolve(plan, model, 2)
    else:
        assert isinstance(resolve(plan, model, 2).module_strategies["model.layers.0.mlp.down_proj"], OwnInOrder)
