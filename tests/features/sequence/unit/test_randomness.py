"""Random numbers of ranks that have parts of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tp_transformers.features.sequence.randomness import SequenceRandomness
from tp_transformers.features.sequence.sequence import SequenceGatherParallel
from tp_transformers.features.sequence.signatures import gathers_sequence


def test_what_others_ask_of_a_gather() -> None:
    assert gathers_sequence(SequenceGatherParallel().signature)
    assert type(SequenceGatherParallel().around_replicated).__name__ == "SequenceReplicatedParallel"


class Layer(nn.Module):
    """A layer that has a part of the sequence, and two blocks that join it; what it computes is checkpointed within."""

    def __init__(self, rank: int, group: Any) -> None:
        super().__init__()
        self.first, self.second, self.p_drop = nn.Sequential(nn.Dropout(0.5)), nn.Sequential(nn.Dropout(0.5)), 0.5
        for block in (self.first, self.second):
            block.tp_strategy = SequenceGatherParallel()  # type: ignore[assignment]
        SequenceRandomness(rank, torch.device("cpu"), group, SequenceGatherParallel()).attach(self)
        self.seen: list[torch.Tensor] = []

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.first, self.second):
            x = block(x)
            self.seen.append(x.detach() != 0)
            x = nn.functional.dropout(x, self.p_drop, self.training)
            self.seen.append(x.detach() != 0)
        return x * 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_ranks_draw_their_own_for_their_part_of_a_sequence() -> None:
    group: Any = type("Group", (), {"group_name": "parts"})()
    found = []
    for rank in range(2):
        torch.manual_seed(3)
        layer, inputs = Layer(rank, group), [torch.ones(1000, requires_grad=True) for _ in range(2)]
        outputs = [layer(x) for x in inputs]
        seen = [mask.clone() for mask in layer.seen]
        state = torch.get_rng_state()
        for output in outputs[::-1]:  # where the second is computed again, nothing says that it has ended
            output.sum().backward()
        for x, output in zip(inputs, outputs, strict=True):
            assert torch.equal(x.grad, output), "the same masks again"
        assert torch.equal(torch.get_rng_state(), state)
        found.append((seen, state))
    (first, one), (second, other) = found
    assert torch.equal(one, other)
    assert len(first) == 8
    assert torch.equal(first[0], second[0]), "in a block, of the whole"
    alike = (first[1] == second[1])[first[0]].float().mean().item()
    assert abs(alike - 0.5) < 0.15  # of about 500
    with torch.no_grad():  # which is cut only where something said so
        torch.manual_seed(3)
        Layer(0, group)(torch.ones(10))
        state = torch.get_rng_state()
        torch.manual_seed(3)
        Layer(1, group)(torch.ones(10))
        assert torch.equal(torch.get_rng_state(), state)
