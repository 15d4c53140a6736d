"""Caches with the heads of other ranks are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tp_transformers import UnsupportedError
from tp_transformers.features.refusals.refusals import check_cache
from tp_transformers.plans.attention import AttentionHeads
from tp_transformers.slices.layout import Ranks, heads


def of_two_ranks(**settings: Any) -> AttentionHeads:
    return AttentionHeads(*heads(8, 4, Ranks(2)), **settings)


def test_caches_with_heads_of_other_ranks_are_refused() -> None:
    model: Any = nn.Module()
    model.attention = nn.Module()
    model.attention.layer_idx = 1
    own, full = torch.zeros(1, 2, 5, 3), torch.zeros(1, 4, 5, 3)

    def check(*keys: Any) -> None:
        check_cache(model, SimpleNamespace(layers=[SimpleNamespace(keys=each) for each in keys]))

    check(own, full)  # the model has no plan
    model.tp_group = SimpleNamespace(rank=0)
    model.tp_resolution = SimpleNamespace(attention={"attention": of_two_ranks()})
    for keys in ((full, own), (full,), (full, None), (full, full[0])):
        check(*keys)
    with pytest.raises(UnsupportedError, match=r"got 4 KV heads in layer 1 of .*, expected 2, the heads of this rank"):
        check(own, full)
    model.tp_resolution.attention = {"attention": of_two_ranks(is_latent=True)}
    check(own, full)
