"""fp16 with torch's own GradScaler: the ranks skip the steps that one process skips, and scale as it does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.comparisons import full_parameters, ranks_agree, read_folder, relative, relative_errors
from tests.support.models import load
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.training import BATCH, MAX_NORM, WEIGHT_TOLERANCE, mesh_of, with_trainer

INFINITE = {1: ("self_attn.k_proj", 1), 3: ("mlp.down_proj", 0), 4: ("embed_tokens", 1), 6: ("lm_head", 0)}
"""Step -> the parameter of which one rank of the tp axis, that of the number, gets a gradient that is not finite."""


def train(model: Any, batch: torch.Tensor, *, unscales: bool, rank: int | None, **options: Any) -> list[float]:
    """Steps as torch documents them, some with an infinity; the scale after each. `rank`: None for one process."""
    optimizer = torch.optim.AdamW(tp_transformers.training.parameter_groups(model), lr=1e-2, eps=1e-2, **options)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1), []
    clip = tp_transformers.clip_grad_norm_ if rank is not None else nn.utils.clip_grad_norm_
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(model(batch, labels=batch).loss).backward()
        name, at = INFINITE.get(step, ("", -1))
        for path, param in model.named_parameters():
            if name and f".{name}." in f".{path}" and (rank is None or rank == at):
                grad = tp_transformers.local_tensor(param.grad)
                grad.view(-1)[: grad.shape[-1]] = float("inf") if step % 2 else float("nan")
        if unscales:
            scaler.unscale_(optimizer)
            clip(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@functools.cache
def one_process(folder: str, unscales: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    scales = train(model, BATCH, unscales=unscales, rank=None)
    return {name: param.detach() for name, param in model.named_parameters()}, scales


@pytest.mark.parametrize(
    ("size", "mode"),
    [(2, None), *(pytest.param(4, mode, marks=pytest.mark.slow) for mode in ("shard", "replicate"))],
)
@on_ranks()
def test_ranks_skip_what_one_process_skips(folder, mode) -> None:
    """Scales and weights, on ranks or on ranks of copies."""
    mesh = mesh_of(2 if mode else 1)
    copy = mesh["dp"].get_local_rank()
    for unscales, fused in ((False, False), (False, True), (True, False), (True, True)):
        model = load(folder, device_mesh=mesh)
        if mode:
            tp_transformers.data_parallel(model, mesh, mode=mode)
        batch = BATCH.chunk(2)[copy] if mode else BATCH
        # Copies whose gradients are averaged have the same infinities; FSDP's have each its own rows.
        rank = model.tp_group.rank if mode != "shard" or copy == 0 else -2
        scales = train(model, batch, unscales=unscales, rank=rank, fused=fused)
        weights, expected = one_process(folder, unscales)
        assert scales == expected
        assert max(relative_errors(full_parameters(model), weights).values()) < WEIGHT_TOLERANCE


@on_ranks()
def test_overflows_of_fp16_are_skipped_together(folder) -> None:
    """A scale that overflows at first: weights move at last, and all are finite."""
    model = load(folder)
    before = [tp_transformers.local_tensor(param).clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(tp_transformers.training.parameter_groups(model), lr=1e-2)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=0.125), []
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(BATCH, labels=BATCH).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        tp_transformers.clip_grad_norm_(model, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    after = [tp_transformers.local_tensor(param) for param in model.parameters()]
    assert ranks_agree(torch.tensor(scales))
    assert scales[0] < 2.0**24, "the first step is skipped"
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(value.isfinite().all() for value in after)


FP16_TOLERANCE = 0.02
"""Of fp16's 11 bits, through two layers and back."""


@needs("trainer")
def test_trainer_unscales_before_it_clips(pool, cases, tmp_path) -> None:
    folder, arguments = cases(9, 3).folder, (False, False, True)
    (expected,) = pool.run(1, with_trainer, folder, str(tmp_path / "one"), 0, *arguments)
    assert expected["scale"] == 2.0**10, "the first step was skipped"
    one = read_folder(str(tmp_path / "one"))
    results = pool.run(2, with_trainer, folder, str(tmp_path / "two"), 1, *arguments)
    for result in results:
        assert result["scale"] == expected["scale"]
        assert relative(result["losses"], expected["losses"]) < FP16_TOLERANCE
        assert not result["norms"][0].isfinite()
        assert relative(result["norms"][1:], expected["norms"][1:]) < FP16_TOLERANCE
    files = read_folder(str(tmp_path / "two"))
    assert max(relative_errors(files, one).values()) < FP16_TOLERANCE
