"""Every architecture that has a plan, in every awkward shape, held against one process.

`make matrix` runs all of it; without MATRIX=1 in the environment, a few shapes of every architecture.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tp_transformers
from tests.support.architectures import (
    ARCHITECTURES,
    GRADIENT_TOLERANCE,
    LOGITS_TOLERANCE,
    Variant,
    architecture_case,
    observe,
)
from tests.support.comparisons import assert_same_files, compare_seen, ranks_agree, relative
from tests.support.models import Case, by_shares, excess_read, load
from tests.support.tiers import wide
from tp_transformers.seams import features

WHOLE_MATRIX = os.environ.get("MATRIX") == "1"
SIZES = (2, 3, 4) if WHOLE_MATRIX else (2, 4)
ON_FOUR = {"mixtral"}
"""Architectures that the quick suite also runs on four ranks, of which two share a head each."""
LIKE_OTHERS = {
    *("mistral", "qwen3", "qwen3_moe", "gemma", "gemma3_text", "cohere", "cohere2", "glm", "granite", "olmo", "phi"),
    *("starcoder2", "falcon with alibi", "opt", "t5 gated", "ministral", "olmo3", "qwen2_5_vl", "qwen2", "gemma2"),
    *("phi with q/k norms", "gemma3", "bart"),
}
"""Whose parts are those of others: the quick suite leaves them to `make proofs`, and to tests/unit/plans."""


def shapes() -> Iterator[tuple[str, Variant, int]]:
    """(architecture, variant, ranks); the quick suite runs odd heads of each, and those that ranks share of some."""
    for name, architecture in ARCHITECTURES.items():
        for index, variant in enumerate(architecture.variants):
            for size in SIZES:
                last = index == len(architecture.variants) - 1
                on_two = last and size == 2 and name not in LIKE_OTHERS
                if WHOLE_MATRIX or (index == 1 and size == 4 and name in ON_FOUR) or on_two:
                    yield name, variant, size


def compare_and_save(
    name: str, folder: str, reference_file: str, saved: str, shares: Sequence[float] | None = None
) -> dict[str, Any]:
    """Run on every rank: load, compare with the reference, save."""
    model = load(folder, getattr(transformers, ARCHITECTURES[name].model), **by_shares(shares))
    reference = torch.load(reference_file)
    seen = observe(model)
    found = compare_seen(model, seen, reference, noise=True)
    model.save_pretrained(saved)
    params = list(model.parameters())
    whole = sum(tp_transformers.full_tensor(param).nbytes for param in params)
    local = sum(tp_transformers.local_tensor(param).nbytes for param in params)
    stored = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    stored_buffers = sum(buffer.nbytes for buffer in model.buffers() if id(buffer) in stored)
    return {
        **found,
        "loss": relative(seen["loss"], reference["loss"]),
        "agree": ranks_agree(seen["logits"], seen["tokens"]),
        "read": excess_read(model, folder),
        "share": local / whole,
        "held": (local, sum(buffer.nbytes for buffer in model.buffers())),
        "reported": [share - stored_buffers for share in model.tp_report.shares],
        "cache": seen["cache"],
    }


@pytest.mark.parametrize(
    ("name", "variant", "size"),
    [architecture_case(*shape, id="-".join(map(str, (shape[0], *shape[1], shape[2])))) for shape in shapes()],
)
def test_architecture_matches_one_process(pool, made, matrix_summary, name, variant, size) -> None:
    case = made(name, variant)
    with tempfile.TemporaryDirectory() as saved:
        results = pool.run(size, compare_and_save, name, case.folder, case.reference, saved)
        worst = {key: max(result[key] for result in results) for key in ("logits", "loss", "share")}
        print(worst, max(result["grads"] for result in results))
        matrix_summary.append((name, variant, size, {**worst, "grads": max(r["grads"][1] for r in results)}))
        for result in results:
            assert result["logits"] < LOGITS_TOLERANCE
            assert result["loss"] < LOGITS_TOLERANCE
            assert result["tokens"]
            assert result["agree"]
            assert result["read"] == 0  # exactly this rank's bytes, and the headers
            assert result["grads"][1] < GRADIENT_TOLERANCE, result["grads"]
        if size == 2 and variant == ARCHITECTURES[name].variants[0]:
            assert worst["share"] <= ARCHITECTURES[name].share
        assert_as_outlined(case, size, results)
        assert_same_files(case.folder, saved)
        assert Path(saved, "config.json").is_file()


def assert_as_outlined(
    case: Case, size: int, results: list[dict[str, Any]], shares: Sequence[float] | None = None
) -> None:
    """What the ranks hold, keys and values too, is what the planner says without a rank, to the byte."""
    if "planner" not in features():
        return
    from tp_transformers.features.planner.dry_load import survey
    from tp_transformers.features.planner.memory import plan_memory

    lengths, _ = results[0]["cache"]
    surveyed = survey(case.folder).with_shares(None if shares is None else tuple(shares))
    planned = plan_memory(surveyed, size, batch=2, **lengths)
    for rank, result in enumerate(results):
        assert result["held"] == (planned.parameter_bytes[rank], planned.buffer_bytes)
        assert tuple(result["reported"]) == planned.parameter_bytes
        assert result["cache"] == (lengths, planned.cache_bytes[rank])


# Few heads, and much that stands among them: norms within heads, over all heads, sinks, a shared rotary key, biases.
@pytest.mark.parametrize(
    "name",
    wide(
        map(
            architecture_case,
            ["gpt_oss", "olmo2", "deepseek_v3", "t5", "qwen3", "cohere with q/k norms", "falcon with alibi", "phi3"],
        ),
        2,
    ),
)
def test_more_ranks_than_heads_replicate_attention(pool, made, tmp_path, name) -> None:
    heads, kv_heads = ARCHITECTURES[name].variants[0]
    case = made(name, (2, 2 * kv_heads // heads))
    results = pool.run(3, compare_and_save, name, case.folder, case.reference, str(tmp_path / "saved"))
    assert_as_outlined(case, 3, results)
    for result in results:
        assert result["logits"] < LOGITS_TOLERANCE
        assert result["tokens"]
        assert result["agree"]
        assert result["grads"][1] < GRADIENT_TOLERANCE, result["grads"]
    assert_same_files(case.folder, str(tmp_path / "saved"))
