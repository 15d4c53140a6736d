"""Files of transformers' `save_pretrained(distributed_checkpoint=True)`: written and read, here and by transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, modeling_utils
from transformers.distributed import DistributedConfig

import tp_transformers
from tests.support.comparisons import different_tensors, full_parameters
from tests.support.models import load
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks, refused
from tests.support.tiers import wide
from tp_transformers.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.skipif(
    not hasattr(modeling_utils, "get_distributed_checkpoint_dir"), reason="transformers < 5.20"
)


def by_config(folder: str, **sizes: int) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))


def save(folder: str, saved: str, fields: dict[str, int]) -> None:
    """Run on every rank: save as transformers does."""
    with tp_transformers.enable():
        by_config(folder, **fields).save_pretrained(saved, distributed_checkpoint=True)


def save_theirs(folder: str, saved: str) -> None:
    """Run on every rank: transformers' own tensor parallelism and save."""
    dist.init_process_group("gloo")
    by_config(folder, tp_size=2).save_pretrained(saved, distributed_checkpoint=True)


def parameters(saved: str) -> dict[str, torch.Tensor]:
    """Run on every rank: the parameters that a load with a plan finds, unsharded."""
    return full_parameters(load(saved))


def own(folder: str) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.parametrize(
    ("heads", "fields"),
    wide([((9, 3), {"tp_size": 3}), ((8, 4), {"tp_size": 2, "fsdp_size": 2}), ((8, 2), {"tp_size": 4})], 2),
)
def test_transformers_and_any_number_of_ranks_read_what_is_saved(pool, cases, tmp_path, heads, fields) -> None:
    folder, saved = cases(*heads).folder, str(tmp_path)
    ranks = fields["tp_size"] * fields.get("fsdp_size", 1)
    for _ in range(2):  # over the files of an earlier save
        pool.run(ranks, save, folder, saved, fields)
    assert different_tensors(own(saved), own(folder)) == []
    for found in pool.run(2, parameters, saved):
        assert different_tensors(found, own(folder)) == []


@pytest.mark.parametrize("name", ["phi3", "mixtral"])
def test_fused_projections_and_experts(pool, made, tmp_path, name) -> None:
    case, saved = made(name, (6, 3)), str(tmp_path)
    pool.run(2, save, case.folder, saved, {"tp_size": 2})
    assert different_tensors(own(saved), own(case.folder)) == []
    for found in pool.run(3, parameters, saved):
        assert different_tensors(found, own(case.folder)) == []


def test_what_transformers_saved_is_read(pool, cases, tmp_path) -> None:
    folder, saved = cases(8, 4).folder, str(tmp_path)
    pool.run(2, save_theirs, folder, saved)
    for found in pool.run(3, parameters, saved):
        assert different_tensors(found, own(folder)) == []


def test_a_missing_file_is_an_error(pool, cases, tmp_path) -> None:
    pool.run(3, save, cases(9, 3).folder, str(tmp_path), {"tp_size": 3})
    next(tmp_path.glob("shard-00002-*")).unlink()
    error = pool.error(2, parameters, str(tmp_path))
    assert error.startswith(CheckpointError.__name__)
    assert "one should begin at" in error


@needs("data_parallel")
@pytest.mark.parametrize("given", [{"state_dict": True}, {"variant": "fp16"}, {"push_to_hub": True}])
@on_ranks(heads=(8, 4))
def test_what_the_format_cannot_take_is_refused(folder, tmp_path, given) -> None:
    with tp_transformers.enable():
        model, name = by_config(folder, tp_size=2), next(iter(given))
        given = {"state_dict": model.state_dict()} if name == "state_dict" else given
        with refused(UnsupportedError, f"distributed_checkpoint with {name}"):
            model.save_pretrained(tmp_path, distributed_checkpoint=True, **given)
    assert not list(tmp_path.iterdir())
