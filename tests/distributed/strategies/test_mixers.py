"""Mixers that are cut by heads, held against one process in fp64: logits, tokens, gradients, states, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.strategies.test_collectives_count import counted
from tests.support.architectures import gradient_errors
from tests.support.models import MASK, PROMPTS, assert_same_files, load, relative, save_as_loaded
from tests.support.pool import Pool
from tests.support.tiers import wide
from tests.support.tiny_mixers import HIDDEN, MIXERS, STATE, states
from tp_transformers.infer.small_model import computing_in, convert

pytestmark = pytest.mark.distributed

Layouts = tuple[tuple[int, int], ...]

LAYOUTS: dict[str, Layouts] = {"8 heads": ((8, 2), (8, 1)), "other heads": ((6, 3), (9, 3), (8, 4), (8, 8))}
"""(heads, groups)."""
TOLERANCE = 1e-9  # float64: only the order of the sums differs, which delta nets magnify


def observe(model: Any) -> dict[str, Any]:
    """What a model does with a left-padded batch, in numbers."""
    convert(model, torch.float64)
    with computing_in(torch.float64):
        with torch.no_grad():
            logits = model(PROMPTS, attention_mask=MASK).logits
        made = model.generate(
            PROMPTS, attention_mask=MASK, max_new_tokens=5, do_sample=False, return_dict_in_generate=True
        )
        model.train()
        output = model(PROMPTS, attention_mask=MASK, use_cache=False).logits
        (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        model.eval()
    return {
        "logits": logits,
        "trained": output.detach(),
        "tokens": made.sequences,
        "states": sum(state.nbytes for state in states(made.past_key_values)),
        "grads": {name: param.grad for name, param in model.named_parameters() if param.grad is not None},
    }


def compare(folders: dict[str, str], saved: str) -> dict[str, dict[str, Any]]:
    """Run on every rank: the largest differences from one process, of outputs and gradients, and what is cut."""
    found = {}
    for name, folder in folders.items():
        model = load(folder, dtype=torch.float64)
        seen, expected = observe(model), torch.load(Path(folder).parent / "reference.pt")
        model.save_pretrained(f"{saved}/{name}")
        errors = gradient_errors(model, seen["grads"], expected["grads"])
        assert seen["grads"].keys() == expected["grads"].keys(), name
        worst = max(errors, key=errors.__getitem__)
        params = [param for key, param in model.named_parameters() if ".mamba." in key or ".linear_attn." in key]
        found[name] = {
            "logits": max(relative(seen[key], expected[key]) for key in ("logits", "trained")),
            "tokens": torch.equal(seen["tokens"], expected["tokens"]),
            "gradient": (errors[worst], worst),
            "states": seen["states"] / expected["states"],
            "mixers": sum(p.tp_shard.layout is None for p in params),
        }
    return found


@pytest.mark.parametrize("layouts", wide(LAYOUTS, 1))
@pytest.mark.parametrize("size", wide([3, 2, 4], 1))
@pytest.mark.parametrize("name", wide(MIXERS, 1))
def test_mixers_match_one_process(pool: Pool, tmp_path: Path, name: str, size: int, layouts: str) -> None:
    folders = {}
    for heads, groups in LAYOUTS[layouts]:
        folder = tmp_path / f"{heads}-{groups}"
        model = save_as_loaded(MIXERS[name].make(heads, groups), folder)
        torch.save(observe(model), folder / "reference.pt")
        folders[folder.name] = str(folder / "checkpoint")
    results = pool.run(size, compare, folders, str(tmp_path / "saved"))
    for layout, folder in folders.items():
        print(name, size, layout, results[0][layout], [round(seen[layout]["states"], 3) for seen in results])
        for seen in (result[layout] for result in results):
            assert seen["logits"] < TOLERANCE, layout
            assert seen["tokens"], layout
            assert seen["gradient"][0] < TOLERANCE, layout
        assert_same_files(folder, str(tmp_path / "saved" / layout))


def count(folders: dict[str, str]) -> dict[str, tuple[dict[str, int], list[int]]]:
    """Run on every rank: the collectives inside the layers, by name, and the numbers that each all-reduce sums."""
    found = {}
    for name, folder in folders.items():
        _, inside, reduced = counted(load(folder))
        found[name] = dict(inside), reduced
    return found


def test_a_mixer_sums_its_output_and_gathers_nothing(pool: Pool, tmp_path: Path) -> None:
    tokens = PROMPTS.numel()
    output, square = tokens * HIDDEN, tokens
    expected = {
        "mamba2, 8, 4": [output],
        "mamba2, 8, 1": [square, output],  # the norm of a group that both ranks have
        "mamba, 8, 8": [tokens * (8 + 2 * STATE), output],  # dt, B and C of all channels
        "qwen3_5_text, 8, 4": [output, output],  # and an MLP
        "lfm2, 8, 8": [output, output],
    }
    folders = {}
    for key in expected:
        name, heads, groups = key.split(", ")
        save_as_loaded(MIXERS[name].make(int(heads), int(groups)).float(), tmp_path / key)
        folders[key] = str(tmp_path / key / "checkpoint")
    for result in pool.run(2, count, folders):
        for key, (inside, reduced) in result.items():
            assert inside.keys() == {"all_reduce"}, key
            assert reduced == 2 * expected[key], key  # two layers
