"""Dropout: ranks drop alike what they hold whole, and each its own of what is cut."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import tp_transformers
from tests.support import architectures
from tests.support.comparisons import ranks_agree, relative
from tests.support.models import load
from tests.support.tiers import wide
from tests.support.training import BATCH, GRADIENT_TOLERANCE

DROPOUT = {
    "llama": {"attention_dropout": 0.3},
    "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    "bart": {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2},
}
INSIDE = ("o_proj", "attn.c_proj", "out_proj", "fc2")
"""Modules whose inputs are a rank's own."""


class Adapter(nn.Module):
    """As LoRA's layers are: beside the layer that it is around, it drops some of the same, whole, input."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.drop = nn.Dropout(0.5)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base_layer(x)
        self.seen.append(self.drop(x).detach())
        return output


def remember(seen: list[torch.Tensor], module: nn.Module, args: Any) -> None:
    seen.append(args[0].detach().abs().sum((-1, -2)))


def trained(name: str, folder: str, checkpoints: dict[str, bool] | None) -> dict[str, Any]:
    """Train with a kind of checkpoints, or without: what ranks hold whole is the same on all, and nothing else is."""
    auto = getattr(transformers, architectures.ARCHITECTURES[name].model)
    model = load(folder, auto, **DROPOUT[name]).train()
    adapters = []
    if name == "llama":
        attention = model.model.layers[0].self_attn
        adapters = [Adapter(attention.q_proj), Adapter(attention.v_proj)]
        attention.q_proj, attention.v_proj = adapters
    if checkpoints is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)
    zeros: list[torch.Tensor] = []
    for path, module in model.named_modules():
        if path.endswith(INSIDE):
            module.register_forward_pre_hook(functools.partial(remember, zeros))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        output = model(BATCH, labels=BATCH)
        output.loss.backward()
        optimizer.step()
        losses.append(output.loss.item())
    whole = [tp_transformers.local_tensor(param) for param in model.parameters() if param.tp_shard.layout is None]
    seen = [seen for adapter in adapters for seen in adapter.seen]
    assert ranks_agree(output.logits.detach(), torch.get_rng_state(), *whole, *seen)
    assert checkpoints is not None or not ranks_agree(zeros[0])
    weights = [tp_transformers.full_tensor(param) for param in model.parameters()]
    return {"losses": losses, "recomputed": len(zeros), "weights": weights}


def drop(name: str, folder: str) -> None:
    """Run on every rank."""
    plain = trained(name, folder, None)
    for use_reentrant in (False, True):
        found = trained(name, folder, {"use_reentrant": use_reentrant})
        assert found["recomputed"] > plain["recomputed"]
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        pairs = zip(found["weights"], plain["weights"], strict=True)
        assert max(relative(mine, theirs) for mine, theirs in pairs) < GRADIENT_TOLERANCE


@pytest.mark.parametrize("name", wide(DROPOUT, 1))
def test_dropout_keeps_whole_activations_the_same(pool, tmp_path, name) -> None:
    heads = architectures.ARCHITECTURES[name].variants[-1]
    case = architectures.make_case(tmp_path, name, *heads)
    pool.run(2, drop, name, case.folder)


def even_heads_draw_their_own(folder: str) -> list[torch.Tensor]:
    """Attention weights that are dropped, of two ranks that hold the same heads: only the masks can differ."""
    model = load(folder, attention_dropout=0.5, attn_implementation="eager").train()
    rank = dist.get_rank()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                tp_transformers.local_tensor(projection.weight).fill_(0.01)
    torch.manual_seed(7)
    seen: list[torch.Tensor] = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(functools.partial(remember, seen))
    model(BATCH)
    assert rank == model.tp_group.rank
    return [seen[0], torch.get_rng_state()]


def test_attention_masks_differ_between_ranks(pool, cases) -> None:
    (first, one_state), (second, other_state) = pool.run(2, even_heads_draw_their_own, cases(8, 4).folder)
    assert first.shape == second.shape
    assert not torch.equal(first, second)
    assert torch.equal(one_state, other_state)
