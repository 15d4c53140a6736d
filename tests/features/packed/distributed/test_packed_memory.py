"""Memory of packed weights: a load, a forward and a save need little besides what the rank holds."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import tp_transformers
from tests.support import quantized
from tests.support.memory import Memory
from tests.support.models import load
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide

TILE = 1 << 16
"""Elements decoded at a time, in place of a million."""
SIZES = {
    "features.quantized.bundle._TILE": TILE,
    "features.packed.tiled._TILE": 4 * TILE,
}
HIDDEN, INTERMEDIATE, LAYERS = 256, 4096, 3
MATRIX = HIDDEN * INTERMEDIATE
"""Elements of each of the 3 large matrices of a layer."""
TOKENS = 128
FORMATS = {
    "int4 with zero points": partial(quantized.compressed, bits=4, group=32, symmetric=False),
    "nvfp4": partial(quantized.small_groups, form="nvfp4-pack-quantized"),
    "int8 by rows": partial(quantized.compressed, bits=8),
    "gptq": quantized.gptq,
}


@pytest.mark.parametrize("variant", wide(list(FORMATS), 1))
@on_ranks()
def test_one_weight_at_a_time(folders, tmp_path) -> None:
    """Bytes at the peak of each step, without those that the step leaves behind."""
    packed, plain = folders
    with ExitStack() as stack:
        for name, size in SIZES.items():
            stack.enter_context(mock.patch(f"tp_transformers.{name}", size))
        with Memory() as memory:
            model = load(packed, dtype=torch.bfloat16, tp_dequantize=False)
        found = {"load": memory.peak - memory.live, "held": memory.live}
        tokens = torch.arange(TOKENS)[None] % 60
        for name, each in (("forward", model), ("plain forward", load(plain, dtype=torch.bfloat16))):
            with torch.no_grad(), Memory(each) as memory:
                each(tokens, use_cache=False)
            found[name] = memory.peak
        with Memory(model) as memory:
            model.save_pretrained(tmp_path / "full")
        found["save"] = memory.peak
        with Memory(model) as memory:
            tp_transformers.save_sharded(model, tmp_path / "sharded")
        found["sharded"] = memory.peak
    assert found["held"] > MATRIX * 3 * LAYERS // 2 // 2  # 4 bits for each element of a half
    assert found["load"] < 3 * MATRIX // 2 + 8 * TILE  # the integers of one weight, and an int32 tile
    assert found["forward"] < found["plain forward"] + 24 * TILE
    assert found["save"] < 3 * MATRIX  # complete words of one module, and one shard
    assert found["sharded"] < 2 * MATRIX


@pytest.fixture
def folders(tmp_path, variant):
    """A quantised checkpoint of large matrices, and one in floating point."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    FORMATS[variant](tmp_path / "plain", tmp_path / "packed")
    return tmp_path / "packed", tmp_path / "plain"
