"""What the tests of adapters share."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.models import VOCAB


@pytest.fixture(scope="session")
def fused(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GPT-2 with fused projections, stored transposed, of three heads, and random biases."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 1, "n_head": 3, "n_positions": 32, "n_inner": 50, "vocab_size": VOCAB}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, initializer_range=0.2))
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(param, std=0.2)
    model.save_pretrained(folder)
    return str(folder)
