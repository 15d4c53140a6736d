"""Attention of one token on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention

from tp_transformers.features.cpu_decode.attention import GROUPED_QUERIES

HAS_PACK = hasattr(sdpa_attention, "pack_gqa")


@pytest.mark.parametrize(("tokens", "heads", "packs"), [(1, 3, True), (4, 3, False), (1, 9, False)])
@pytest.mark.parametrize("batch", [1, 2])
def test_query_heads_of_a_group_are_rows_of_one_product(tokens: int, heads: int, packs: bool, batch: int) -> None:
    torch.manual_seed(0)
    module: Any = SimpleNamespace(num_key_value_groups=9 // heads, is_causal=True, tp_attends_to_rows=True)
    query = torch.randn(batch, 9, tokens, 16)
    key, value = torch.randn(2, batch, heads, 20, 16).unbind()
    original = AttentionInterface()["sdpa"]
    expected, _ = original(module, query, key, value, None)
    GROUPED_QUERIES.hold()
    try:
        attend, compute = AttentionInterface()["sdpa"], functional.scaled_dot_product_attention
        with mock.patch.object(functional, "scaled_dot_product_attention", wraps=compute) as seen:
            output, _ = attend(module, query, key, value, None)
    finally:
        GROUPED_QUERIES.release()
    if HAS_PACK:
        assert seen.call_args.args[0].shape == ((batch, heads, 9 // heads, 16) if packs else query.shape)
    torch.testing.assert_close(output, expected)
    assert AttentionInterface()["sdpa"] is original


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 2), (torch.float32, 1)])
def test_a_single_bfloat16_row_is_computed_twice(dtype: torch.dtype, rows: int, masked: bool) -> None:
    torch.manual_seed(0)
    module: Any = SimpleNamespace(is_causal=True, tp_attends_to_rows=True)
    query, keys = torch.randn(2, 3, 1, 16), torch.randn(2, 2, 3, 20, 16)
    mask = torch.rand(2, 1, 1, 20) < 0.5 if masked else None
    query, (key, value) = query.to(dtype), keys.to(dtype).unbind()
    exact = functional.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask)
    GROUPED_QUERIES.hold()
    try:
        compute = functional.scaled_dot_product_attention
        with mock.patch.object(functional, "scaled_dot_product_attention", wraps=compute) as seen:
            output, _ = AttentionInterface()["sdpa"](module, query, key, value, mask, is_causal=True)
    finally:
        GROUPED_QUERIES.release()
    assert seen.call_args.args[0].shape[2] == rows
    torch.testing.assert_close(output.double(), exact.transpose(1, 2), atol=1e-2, rtol=1e-2)


def test_attention_of_other_models_is_transformers_own() -> None:
    query, key, value = torch.randn(3, 1, 3, 1, 16).bfloat16()
    GROUPED_QUERIES.hold()
    try:
        compute = functional.scaled_dot_product_attention
        with mock.patch.object(functional, "scaled_dot_product_attention", wraps=compute) as seen:
            AttentionInterface()["sdpa"](SimpleNamespace(is_causal=True), query, key, value, None)
    finally:
        GROUPED_QUERIES.release()
    assert seen.call_args.args[0].shape == query.shape


def test_an_attention_of_a_user_stays() -> None:
    original = AttentionInterface()["sdpa"]
    GROUPED_QUERIES.hold()
    try:
        AttentionInterface.register("sdpa", own := lambda *_: None)
        GROUPED_QUERIES.release()
        assert AttentionInterface()["sdpa"] is own
    finally:
        AttentionInterface.register("sdpa", original)
