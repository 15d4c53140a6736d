"""Random numbers under sequence parallelism: each rank draws its own numbers for its shard of the sequence.

Each rank has its own tokens outside of the blocks, which gather the sequence:

    shard ── norm ── block ── [ own state: dropout, sum, norm ] ── block ── [ own state: dropout, sum ] ── shard
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...model.dropout import OwnRandomness
from ...ranks.collectives import Group
from ...strategies import TensorParallelLayer, block_of, join_layers
from .sequence import SequenceBlock


def draw_between_blocks(model: Any) -> None:
    """Let the modules around blocks that gather the sequence draw this rank's own numbers between the blocks."""
    group, strategies = model.tp_group, model.tp_resolution.module_strategies
    blocks = {name.rpartition(".")[0]: block for name, block in strategies.items() if isinstance(block, SequenceBlock)}
    for name, strategy in blocks.items():
        module = model.get_submodule(name)
        join_layers(module)
        guards = block_of(module).guards
        guards[:] = [guard for guard in guards if type(guard) is not OwnRandomness]
        SequenceRandomness(group.rank, group.device, group.process_group, strategy).attach(module)


class SequenceRandomness(OwnRandomness):
    """Lets a rank draw its own numbers between the layers of one module, and between its blocks."""

    def __init__(self, rank: int, device: torch.device, group: Group, block: SequenceBlock) -> None:
        """`block`: the strategy of a block of the module, which knows whether the sequence is sharded."""
        super().__init__(rank, device)
        self.group, self.block = group, block

    def hook(self, child: nn.Module, strategy: TensorParallelLayer | None) -> None:
        if strategy is None:
            child.register_forward_pre_hook(self.enter_shard)
        elif isinstance(strategy, SequenceBlock):
            child.register_forward_pre_hook(self.leave)
            child.register_forward_hook(self.enter_shard)
        else:
            super().hook(child, strategy)

    def enter_shard(self, *_: Any) -> None:
        """Switch to the own state if this rank has a shard of the sequence."""
        if self.block.is_sharded(self.group):
            self.enter()
