"""The layers that are wrapped one by one."""

from __future__ import annotations

from torch import nn
from transformers import LlamaForCausalLM

from tests.support.architectures import ARCHITECTURES
from tests.support.models import llama_config
from tp_transformers.features.data_parallel.fsdp import layers_of


def test_layers_are_those_that_transformers_does_not_split() -> None:
    llama = LlamaForCausalLM(llama_config(8, 4))
    assert layers_of(llama) == [*llama.model.layers][::-1]
    bart = ARCHITECTURES["bart"].make(8, 8)
    assert set(layers_of(bart)) == {*bart.model.encoder.layers, *bart.model.decoder.layers}
    block = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert layers_of(block) == [*block[0]][::-1]
