"""Gradients in bf16 that are summed in fp32, against sums in fp64."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.groups import join
from tests.support.models import load
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks, refused
from tests.support.training import BATCH, mesh_of
from tp_transformers.ranks.direct import BACKEND, transport_of

ROUNDED_ONCE = 2.0**-8 * (1 + 2.0**-10)
"""Half a step of bf16, relative, and what fp32 adds to it."""
SHARED = "model.layers.0.self_attn.k_proj.weight"
"""What all ranks hold where there is one KV head."""


def sum_error(value: torch.Tensor, parts: list[torch.Tensor], *, mean: bool) -> float:
    """The largest relative difference to the sum, or mean, of `parts` in fp64."""
    exact = torch.stack(parts).double().sum(0) / (len(parts) if mean else 1)
    return ((value.double() - exact).abs() / exact.abs().clamp(min=1e-30)).max().item()


def everyones(value: torch.Tensor) -> list[torch.Tensor]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def shared_heads(folder: str, way: str) -> list[float]:
    """Run on every rank: the errors of a gradient that all ranks have a part of, without the option and with it."""
    errors = []
    with mock.patch.dict(os.environ, {"TP_TRANSFORMERS_SHARED_MEMORY": "0"} if way == "gloo" else {}):
        assert (transport_of(join().process_group) is BACKEND) == (way == "gloo")
    for options in ({}, {"tp_reduce_dtype": torch.float32}):
        model = copy.deepcopy(load(folder, dtype=torch.bfloat16, **options))
        param = model.get_parameter(SHARED)
        part = torch.randn(param.shape, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
        param.tp_shard.view(param).backward(part)
        errors.append(sum_error(param.grad, everyones(part), mean=False))
    return errors


def copies(folder: str, mode: str) -> list[float]:
    """Run on every rank, each a copy of the model: the same of the mean over copies."""
    mesh, errors = mesh_of(int(os.environ["WORLD_SIZE"])), []
    mine = BATCH[dist.get_rank()][None]
    alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    alone(mine, labels=mine).loss.backward()
    for options in ({}, {"tp_reduce_dtype": torch.float32}):
        model = load(folder, device_mesh=mesh, dtype=torch.bfloat16, **options)
        tp_transformers.data_parallel(model, mesh, mode=mode)  # type: ignore[arg-type]
        model(mine, labels=mine).loss.backward()
        found = [
            sum_error(
                tp_transformers.full_tensor(param, param.grad), everyones(alone.get_parameter(name).grad), mean=True
            )
            for name, param in model.named_parameters()
            if "proj" in name
        ]
        errors.append(max(found))
    return errors


@needs("full_parameters")
@pytest.mark.parametrize("way", ["gloo", "memory", "replicate", "shard"])
@on_ranks(3, heads=(8, 1))
def test_gradients_are_summed_in_fp32(folder, way) -> None:
    without, with_option = (shared_heads if way in ("gloo", "memory") else copies)(folder, way)
    assert with_option < ROUNDED_ONCE
    assert (without < ROUNDED_ONCE) == (way == "memory")


@on_ranks(heads=(8, 1))
def test_other_dtypes_are_one_error_on_all_ranks(folder) -> None:
    dist.init_process_group("gloo")
    for dtype, says in (
        ("float32", "tp_reduce_dtype: got 'float32'"),
        (torch.int32, "tp_reduce_dtype: got torch.int32"),
        (torch.float32 if dist.get_rank() else None, "got 'None' on rank 0 and 'torch.float32' on rank 1"),
    ):
        with refused(tp_transformers.TensorParallelError, says):
            load(folder, tp_reduce_dtype=dtype)
