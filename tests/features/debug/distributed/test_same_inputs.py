"""`check_inputs`: ranks whose inputs differ all stop with one error."""

import os

import torch
import torch.distributed as dist

import tp_transformers
from tests.support.models import load
from tests.support.training import BATCH


def guarded(folder: str, kind: str) -> bool:
    os.environ["TP_TRANSFORMERS_DEBUG"] = str(int(kind == "environment"))
    try:
        model = load(folder)
    finally:
        del os.environ["TP_TRANSFORMERS_DEBUG"]
    handle = tp_transformers.debug.check_inputs(model) if kind != "environment" else None
    model(BATCH, attention_mask=torch.ones_like(BATCH), use_cache=False)
    rank = dist.get_rank()
    if kind == "random state":
        torch.manual_seed(rank)
        model(BATCH)  # which draws nothing
        model.train()(BATCH)
    if kind == "removed":
        assert handle is not None
        handle.remove()
    model(input_ids=BATCH - rank) if kind == "keyword" else model(BATCH - rank, attention_mask=None)
    return True


def test_different_inputs_are_one_error_on_all_ranks(pool, cases) -> None:
    folder = cases(8, 4).folder
    assert pool.run(2, guarded, folder, "removed") == [True, True]
    for kind, subject in (("keyword", "input_ids"), ("environment", "input_ids"), ("random state", "random state")):
        error = pool.error(2, guarded, folder, kind)
        assert error.startswith("MeshError: the inputs of the model: got ")
        assert f"{subject} on rank 1" in error
