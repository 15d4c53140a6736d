"""Models on GPUs against one process there: logits, tokens, losses, gradients and saved files, in three dtypes."""

from typing import Any

import pytest
import torch
import transformers

from tests.support.architectures import ARCHITECTURES, GRADIENT_TOLERANCE, LOGITS_TOLERANCE, Variant, observe
from tests.support.comparisons import assert_as_one_process, assert_same_files, compare_seen, ranks_agree, relative
from tests.support.devices import DEVICE, load_here, one_process, start
from tests.support.models import PROMPTS, logits_of
from tests.support.models import observe as observe_llama
from tests.support.tiers import wide

SHAPES: list[tuple[str, Variant, int]] = [
    ("llama", (9, 3), 2),
    ("mixtral", (8, 2), 2),
    ("llama", (8, 2), 3),
    ("qwen3", (6, 3), 2),
    ("phi3", (9, 3), 2),
    ("olmo2", (9, 3), 2),
    ("gpt_oss", (8, 2), 3),
    ("deepseek_v3", (6, 6), 2),
    ("gpt2", (9, 9), 2),
    ("gemma3_text", (8, 1), 3),
    ("qwen2_vl", (8, 4), 2),
    ("t5", (6, 6), 2),
    ("llama", (8, 1), 4),
]
"""(architecture, query and KV heads, ranks)."""


def compare_and_save(name: str, folder: str, saved: str) -> dict[str, Any]:
    """Run on every rank: differences from one process on this device; the model is saved."""
    auto = getattr(transformers, ARCHITECTURES[name].model)
    reference = observe(one_process(folder, auto))
    model = load_here(folder, auto)
    seen = observe(model)
    assert seen["logits"].device.type == DEVICE
    found = compare_seen(model, seen, reference, noise=True)
    model.save_pretrained(saved)
    return {
        **found,
        "loss": relative(seen["loss"], reference["loss"]),
        "agree": ranks_agree(seen["logits"].cpu(), seen["tokens"].cpu()),
    }


@pytest.mark.parametrize(("name", "variant", "size"), wide(SHAPES, 2))
def test_a_model_is_that_of_one_process(pool, made, tmp_path, name, variant, size) -> None:
    case = made(name, variant)
    for result in pool.run(size, compare_and_save, name, case.folder, str(tmp_path / "saved")):
        print(result)
        assert_as_one_process(result, LOGITS_TOLERANCE, GRADIENT_TOLERANCE)
    assert_same_files(case.folder, str(tmp_path / "saved"))


def short_floats(folder: str, dtype: torch.dtype) -> tuple[float, float, bool]:
    """Run on every rank: errors of the logits, ours and those of one process, to fp32; whether all ranks agree."""
    exact = logits_of(one_process(folder))
    plain, ours = logits_of(one_process(folder, dtype=dtype)), logits_of(load_here(folder, dtype=dtype))
    return relative(ours.float(), exact), relative(plain.float(), exact), ranks_agree(ours.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_as_exact_as_in_one_process(pool, cases, dtype) -> None:
    for ours, plain, agree in pool.run(2, short_floats, cases(9, 3).folder, dtype):
        assert ours < 2 * plain + torch.finfo(dtype).eps  # a partial sum of each rank is rounded
        assert agree


def generated(folder: str) -> dict[str, Any]:
    """Run on every rank: new tokens in each way, ours and those of one process."""
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "static cache": {"do_sample": False, "cache_implementation": "static"},
        "beams": {"do_sample": False, "num_beams": 3},
    }
    models = (load_here(folder), one_process(folder))
    return {
        name: [
            model.generate(PROMPTS.to(DEVICE), max_new_tokens=12, pad_token_id=0, disable_compile=True, **way).tolist()
            for model in models
        ]
        for name, way in ways.items()
    }


def sampled(folder: str) -> list[Any]:
    """Run on every rank: sampled tokens with one seed."""
    model = load_here(folder)
    torch.manual_seed(3)
    return model.generate(PROMPTS.to(DEVICE), max_new_tokens=12, do_sample=True, top_k=0).tolist()


def test_tokens_are_those_of_one_process(pool, cases) -> None:
    for found in pool.run(2, generated, cases(9, 3).folder):
        for name, (ours, plain) in found.items():
            assert ours == plain, name
    first, second = pool.run(2, sampled, cases(9, 3).folder)
    assert first == second


def copies(folder: str) -> dict[str, Any]:
    """Run on every rank of two copies of two ranks: the model beside one process."""
    reference = observe_llama(one_process(folder))
    model = load_here(folder, mesh=start(2, 2, names=("dp", "tp")))
    return compare_seen(model, observe_llama(model), reference)


def test_a_mesh_of_two_axes(pool, cases) -> None:
    for result in pool.run(4, copies, cases(8, 2).folder):
        assert_as_one_process(result, LOGITS_TOLERANCE, GRADIENT_TOLERANCE)
