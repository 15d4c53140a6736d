"""Weights that torchao quantises as they arrive on each rank, against what it makes of them in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TorchAoConfig

import tp_transformers
from tests.support.comparisons import relative
from tests.support.models import llama_config, load, logits_of
from tests.support.on_ranks import on_ranks
from tp_transformers.features.packed.weight import PACKED, packed_weights
from tp_transformers.loading import memory

pytest.importorskip("torchao")
pytestmark = pytest.mark.slow

BY_ROWS = ("int8", "float8")


def config_of(kind: str) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    return {
        "int8": lambda: Int8WeightOnlyConfig(),
        "float8": lambda: Float8WeightOnlyConfig(),
        "int8 by groups": lambda: Int8WeightOnlyConfig(granularity=PerGroup(16)),
        "int4 by groups": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)),
    }[kind]()


def quantised(weight: torch.Tensor, kind: str) -> torch.Tensor:
    from torchao.quantization import quantize_

    linear = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantize_(linear, config_of(kind))
    return linear.weight.dequantize()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["int8", "float8", "int8 by groups", "int4 by groups"])
@on_ranks()
def test_each_rank_quantises_its_own_shard(llama, kind, size) -> None:
    """Quantised shards beside those of torchao, and the model beside one that is not quantised."""
    held: list[int] = []
    fill = memory.Memory._fill_round

    def fill_round(self: Any, names: Any, *args: Any) -> Any:
        held.append(len(names))
        return fill(self, names, *args)

    few = mock.patch.object(memory, "ROUND_BYTES", 20_000)  # some weights a round
    with few, mock.patch.object(memory.Memory, "_fill_round", fill_round):
        model = load(llama, dtype=torch.bfloat16, quantization_config=TorchAoConfig(config_of(kind)))
    dense = load(llama, dtype=torch.bfloat16)
    plain = dict(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).named_parameters())
    shards = dict(dense.named_parameters())
    different, complete = [], []
    for name, weight in packed_weights(model).items():
        mine, own = weight.decoded(), tp_transformers.local_tensor(shards[name])
        if not torch.equal(mine, quantised(own.contiguous(), kind)):
            different.append(name)
        whole = quantised(plain[name].detach(), kind)
        layout = shards[name].tp_shard.layout
        if layout is not None:
            ranges = layout.split.ranges[shards[name].tp_shard.group.rank]
            whole = torch.cat([whole.narrow(layout.dim, start, stop - start) for start, stop in ranges], layout.dim)
        complete.append((name, torch.equal(mine, whole)))
        shards[name].data.copy_(mine) if not hasattr(shards[name], "_local_tensor") else own.copy_(mine)
    assert different == []
    assert sum(len(PACKED.find(module) or {}) for module in model.modules()) == 14
    assert relative(logits_of(model).float(), logits_of(dense).float()) == 0
    assert len(held) > 2, "never is the model in floating point complete"
    assert model.get_memory_footprint() < 0.75 * dense.get_memory_footprint()
    rows = [name for name, same in complete if not same]
    if kind in BY_ROWS and size > 1:  # a scale for the columns of a rank
        assert all("o_proj" in name or "down_proj" in name for name in rows)
    else:
        assert rows == []
    with pytest.raises(tp_transformers.UnsupportedError, match="without quantization_config"):
        model.save_pretrained(f"{llama}-saved")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(6, 6, hidden_size=96, head_dim=16, intermediate_size=192)).save_pretrained(folder)
    return folder


@pytest.fixture
def narrow(tmp_path: Path) -> str:
    """A model of three groups of columns."""
    LlamaForCausalLM(llama_config(6, 6, hidden_size=96, head_dim=16, intermediate_size=48)).save_pretrained(tmp_path)
    return str(tmp_path)


@on_ranks()
def test_groups_that_a_rank_cuts_are_refused(narrow) -> None:
    with pytest.raises(tp_transformers.UnsupportedError, match="groups of 16"):
        load(narrow, dtype=torch.bfloat16, quantization_config=TorchAoConfig(config_of("int4 by groups")))
