"""Mixers that are cut by heads, held against one process in fp64: logits, tokens, gradients, states, files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.strategies.test_collectives_count import counted
from tests.support.architectures import compare_cases, in_float64
from tests.support.comparisons import assert_same_files
from tests.support.models import MASK, PROMPTS, Case, load, save_as_loaded, save_reference, with_shares
from tests.support.needs import needs
from tests.support.pool import Pool
from tests.support.tiers import wide
from tests.support.tiny_mixers import HIDDEN, MIXERS, STATE, states

Layouts = tuple[tuple[int, int], ...]

LAYOUTS: dict[str, Layouts] = {"8 heads": ((8, 2), (8, 1)), "other heads": ((6, 3), (9, 3), (8, 4), (8, 8))}
"""(heads, groups)."""
TOLERANCE = 1e-9  # float64: only the order of the sums differs, which delta nets magnify


REPEATED = 1e-6
"""Tolerance of gradients where the backward repeats norms, whose own code computes in float32: a float64 that
`computing_in` gives to forwards does not reach into hooks of a backward."""


@in_float64
def observe(model: Any) -> dict[str, Any]:
    """What a model does with a left-padded batch, in numbers."""
    with torch.no_grad():
        answer = model(PROMPTS, attention_mask=MASK)
    made = model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    model.train()
    output = model(PROMPTS, attention_mask=MASK, use_cache=False).logits
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    model.eval()
    return {
        "outputs": {"logits": [answer.logits, output.detach()]},
        "tokens": made.sequences,
        "bytes": {"states": sum(state.nbytes for state in states(model, answer, made.past_key_values))},
    }


def make(name: str, layouts: Layouts, path: Path) -> dict[str, Case]:
    """Models by their layouts."""
    cases = {}
    for heads, groups in layouts:
        folder = path / f"{heads}-{groups}"
        model = save_as_loaded(MIXERS[name].make(heads, groups), folder)
        cases[folder.name] = save_reference(observe(model), folder)
    return cases


def divides(heads: int, groups: int, size: int) -> bool:
    """True if all ranks have as many heads, of whole groups or of one."""
    return heads % size == 0 and (groups % size == 0 or size % groups == 0)


def check(pool: Pool, size: int, cases: Any, folder: Path, tolerance: float, compare: Any = compare_cases) -> Any:
    """Models on ranks are those of one process; returns what ranks have seen, by layout."""
    results = pool.run(size, compare, cases, observe, str(folder / "saved"))
    for layout in cases:
        for seen in (result[layout] for result in results):
            assert seen["logits"] < TOLERANCE, layout
            assert seen["tokens"], layout
            assert seen["gradient"][1] < tolerance, layout
            assert seen["read"] == 0, layout  # exactly this rank's bytes, and the headers
    return results


@needs("verify")
@pytest.mark.parametrize("layouts", wide(LAYOUTS, 1))
@pytest.mark.parametrize("size", wide([3, 2, 4], 1))
@pytest.mark.parametrize("name", wide(MIXERS, 1))
def test_mixers_match_one_process(pool, tmp_path, name, size, layouts) -> None:
    cases = make(name, LAYOUTS[layouts], tmp_path)
    results = check(pool, size, cases, tmp_path, TOLERANCE)
    for layout, case in cases.items():
        print(name, size, layout, results[0][layout], [round(seen[layout]["states"], 3) for seen in results])
        if divides(*map(int, layout.split("-")), size):
            assert all(result[layout]["states"] <= 1 / size + 0.05 for result in results), layout
        assert_same_files(case.folder, str(tmp_path / "saved" / layout))


@needs("verify")
@pytest.mark.parametrize("shares", wide(["3,1", "2,1", "1,2,1", "5,3,1", "2,1,1,4"], 1))
@pytest.mark.parametrize("name", wide(["qwen3_next", *(name for name in MIXERS if name != "qwen3_next")], 1))
def test_mixers_follow_shares(pool, tmp_path, name, shares) -> None:
    cases = make(name, ((9, 3), (8, 2)), tmp_path)
    compare = partial(with_shares, shares, compare_cases)
    check(pool, len(shares.split(",")), cases, tmp_path, REPEATED, compare)
    for layout, case in cases.items():
        assert_same_files(case.folder, str(tmp_path / "saved" / layout))


@needs("verify")
@pytest.mark.parametrize("name", wide(["lfm2", "bamba", "qwen3_5_text", "recurrent_gemma", "xlstm", "rwkv"], 1))
def test_mixers_match_on_parts_of_the_sequence(pool, tmp_path, name) -> None:
    compare = partial(compare_cases, tp_sequence_parallel=True)
    check(pool, 3, make(name, ((8, 2),), tmp_path), tmp_path, REPEATED, compare)


@needs("verify")
@pytest.mark.parametrize("name", wide(["zamba", "mamba2", "qwen3_5_text"], 1))
def test_mixers_with_fewer_heads_than_ranks_are_cut_by_features(pool, tmp_path, name) -> None:
    check(pool, 3, make(name, ((2, 2),), tmp_path), tmp_path, TOLERANCE)


def count(folders: dict[str, str]) -> dict[str, tuple[dict[str, int], list[int]]]:
    """Run on every rank: the collectives inside the layers, by name, and the numbers that each all-reduce sums."""
    found = {}
    for name, folder in folders.items():
        _, inside, reduced = counted(load(folder))
        found[name] = dict(inside), reduced
    return found


@needs("architectures")
def test_a_mixer_sums_its_output_and_gathers_nothing(pool, tmp_path) -> None:
    tokens = PROMPTS.numel()
    output, square = tokens * HIDDEN, tokens
    expected = {
        "mamba2, 8, 4": [output],
        "mamba2, 8, 1": [square, output],  # the norm of a group that both ranks have
        "mamba, 8, 8": [tokens * (8 + 2 * STATE), output],  # dt, B and C of all channels
        "qwen3_5_text, 8, 4": [output, output],  # and an MLP
        "kimi_linear, 8, 8": [output, output],
        "lfm2, 8, 8": [output, output],
        "recurrent_gemma, 8, 4": [tokens * 64, tokens * 64],
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
